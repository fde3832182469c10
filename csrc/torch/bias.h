// The bias of a subnetwork on the CPU, b_1 + ... + b_active, without a call of PyTorch's: that would cost as much as a
// small layer.
#pragma once

#include "accumulate.h"
#include "tensors.h"

namespace partkernels::binding {

// Of rows [C, out], the sum of those that are live; a bias [out] as it is.
inline OptionalTensor live_bias(const OptionalTensor& bias, int64_t active) {
  if (!bias || bias->dim() == 1) return dense(bias);
  const Tensor sum = empty({bias->size(1)}, *bias);
  with_type(bias->scalar_type(), [&]<class T>(T) {
    const T* const rows = data<const T>(*bias);
    T* const to = data<T>(sum);
    for (int64_t c = 0; c < bias->size(1); ++c) {
      cpu::Accumulator<T> total = 0;
      for (int64_t r = 0; r < active; ++r) total += cpu::widen(rows[r * bias->stride(0) + c * bias->stride(1)]);
      to[c] = cpu::narrow<T>(total);
    }
  });
  return sum;
}

}  // namespace partkernels::binding
