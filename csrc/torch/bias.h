// The bias of a subnetwork on the CPU, b_1 + ... + b_active, without a call of PyTorch's: that would cost as much as a
// small layer.
#pragma once

#include "accumulate.h"
#include "tensors.h"

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
      cpu::Accumulator<T> total = 0;
      for (int64_t r = 0; r < active; ++r) total += cpu::widen(rows[r * row_stride + c * col_stride]);
      to[c] = cpu::narrow<T>(total);
    }
  });
  return sum;
}

}  // namespace partkernels::binding
