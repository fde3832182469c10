// The bias of a subnetwork on the CPU, b_1 + ... + b_active, and its gradient, without a call of PyTorch's: each would
// cost as much as a small layer.
#pragma once

#include "accumulate.h"
#include "threads.h"

namespace partkernels::binding {

// Of rows [C, out], the sum of those that are live; a bias [out] as it is.
inline OptionalTensor live_bias(const OptionalTensor& bias, int64_t active) {
  if (!bias || bias->dim() == 1) return dense(bias);
  const int64_t out = bias->size(1), row_stride = bias->stride(0), col_stride = bias->stride(1);
  const Tensor sum = empty({out}, *bias);
  with_type(bias->scalar_type(), [&]<class T>(T) {
    const T* const rows = data<const T>(*bias);
    T* const to = data<T>(sum);
    for (int64_t c = 0; c < out; ++c) {
      double total = 0;  // in float, many rows would add up less exactly than by PyTorch
      for (int64_t r = 0; r < active; ++r) total += cpu::widen(rows[r * row_stride + c * col_stride]);
      to[c] = cpu::narrow<T>(static_cast<cpu::Accumulator<T>>(total));
    }
  });
  return sum;
}

// Of a bias [count, out], given grad_y [..., out]: its sum in row `update`, 0 elsewhere.
inline Tensor bias_grad(const Tensor& grad_y, int64_t update, int64_t count) {
  const Tensor rows = collapsible(grad_y);
  const int64_t out = rows.sizes().back();
  Tensor grad = empty({count, out}, rows);
  with_type(rows.scalar_type(), [&]<class T>(T) {
    std::fill_n(data<T>(grad), count * out, T{});
    const auto from = matrix<const T>(rows);
    if (from.rows * out >= kFew) {  // PyTorch's threads add them up faster
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
