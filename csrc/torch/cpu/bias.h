// The bias of a subnetwork on the CPU, b_1 + ... + b_active, and its gradient, without a call of PyTorch's: each would
// cost as much as a small layer.
#pragma once

#include "accumulator.h"
#include "threads.h"

namespace partkernels::binding {

// The sum of the rows of [C, out] that are live.
template <class T>
void add_live_rows(const Tensor& bias, int64_t active, T* to) {
  const T* const rows = data<const T>(bias);
  const int64_t out = bias.size(1), row_stride = bias.stride(0), col_stride = bias.stride(1);
  for (int64_t c = 0; c < out; ++c) {
    double total = 0;  // in float, many rows would add up less exactly than by PyTorch
    for (int64_t r = 0; r < active; ++r) total += cpu::widen(rows[r * row_stride + c * col_stride]);
    to[c] = cpu::narrow<T>(static_cast<cpu::Accumulator<T>>(total));
  }
}

// Of rows [C, out], the sum of those that are live; a bias [out] as it is.
inline OptionalTensor live_bias(const OptionalTensor& bias, int64_t active) {
  if (!bias || bias->dim() == 1) return dense(bias);
  const Tensor sum = empty({bias->size(1)}, *bias);
  with_type(bias->scalar_type(), [&]<class T>(T) { add_live_rows(*bias, active, data<T>(sum)); });
  return sum;
}

// The same for kernels of ours, which need no tensor: to make one would take as long as a small product.
template <class T>
class LiveBias {
 public:
  LiveBias(const OptionalTensor& bias, int64_t active) {
    if (bias && bias->dim() == 2) {
      sum_.resize(bias->size(1));
      add_live_rows(*bias, active, sum_.data());
    } else {
      whole_ = dense(bias);
    }
  }
  const T* data() const { return sum_.empty() ? bias_data<T>(whole_) : sum_.data(); }

 private:
  std::vector<T> sum_;
  OptionalTensor whole_;
};

// Of a bias [count, out], given grad_y [..., out]: its sum in row `update`, 0 elsewhere.
inline Tensor bias_grad(const Tensor& grad_y, int64_t update, int64_t count) {
  const Tensor rows = collapsible(grad_y);
  const int64_t out = rows.sizes().back();
  Tensor grad = empty({count, out}, rows);
  with_type(rows.scalar_type(), [&]<class T>(T) {
    std::fill_n(data<T>(grad), count * out, T{});
    const auto from = matrix<const T>(rows);
    if (from.rows * out >= cpu::kFewEntries) {  // PyTorch's threads add them up faster
      constexpr int64_t kOverRows[] = {0};
      Tensor sum = torch::stable::select(grad, 0, update - 1);
      torch::stable::sum_out(sum, torch::stable::reshape(rows, Sizes{from.rows, out}), kOverRows);
      return;
    }
    // Of so many terms, sums in float would be less exact than PyTorch's.
    std::vector<double> sums(out);
    for (int64_t r = 0; r < from.rows; ++r) {
      for (int64_t c = 0; c < out; ++c) sums[c] += cpu::widen(from.data[r * from.row_stride + c * from.col_stride]);
    }
    T* const to = data<T>(grad) + (update - 1) * out;
    for (int64_t c = 0; c < out; ++c) to[c] = cpu::narrow<T>(static_cast<cpu::Accumulator<T>>(sums[c]));
  });
  return grad;
}

}  // namespace partkernels::binding
