// How the entries of a weight lie in memory.
#pragma once

#include "partkernels/operands.h"

namespace partkernels::cuda {

inline int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }

// A weight whose rows lie in one of these orders, as a linear one.
template <class T>
Weight<T> as_linear(const Weight<T>& w) {
  return {w.data, w.rows, w.cols(), 1, 1, w.row_stride, 1, 0, 0};
}

}  // namespace partkernels::cuda
