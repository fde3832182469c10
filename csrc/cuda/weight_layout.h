// The memory layout of weights.
#pragma once

#include "partkernels/operands.h"

namespace partkernels::cuda {

inline int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }

// A weight with contiguous rows, as a linear weight.
template <class T>
Weight<T> as_linear(const Weight<T>& w) {
  return {w.data, w.rows, w.cols(), 1, 1, w.row_stride, 1, 0, 0};
}

}  // namespace partkernels::cuda
