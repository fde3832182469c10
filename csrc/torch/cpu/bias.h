// The bias of a subnetwork on the CPU, b_1 + ... + b_active, without calling PyTorch: each call would take as long as a
// small layer.
#pragma once

#include "accumulator.h"
#include "threads.h"

namespace partkernels::binding {

// to = the sum of the first `active` rows of a bias [C, out].
template <class T>
void add_live_rows(const Tensor& bias, int64_t active, T* to) {
  const T* const rows = data<const T>(bias);
  const int64_t out = bias.size(1), row_stride = bias.stride(0), col_stride = bias.stride(1);
  for (int64_t c = 0; c < out; ++c) {
    double total = 0;  // in float, sums of many rows would be less exact than PyTorch's
    for (int64_t r = 0; r < active; ++r) total += cpu::widen(rows[r * row_stride + c * col_stride]);
    to[c] = cpu::narrow<T>(static_cast<cpu::Accumulator<T>>(total));
  }
}

// The sum of the active rows of a bias [C, out]; a bias [out] unchanged.
inline OptionalTensor live_bias(const OptionalTensor& bias, int64_t active) {
  if (!bias || bias->dim() == 1) return dense(bias);
  const Tensor sum = empty({bias->size(1)}, *bias);
  with_type(bias->scalar_type(), [&]<class T>(T) { add_live_rows(*bias, active, data<T>(sum)); });
  return sum;
}

// The same for this library's kernels. They need no tensor, and allocating one would take as long as a small product.
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

}  // namespace partkernels::binding
