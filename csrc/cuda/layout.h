// How the entries of a weight lie in memory.
#pragma once

#include "partkernels/operands.h"

namespace partkernels::cuda {

inline int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }

// Whether the entries of a row lie one after another in the order of the map's columns: linear and channels_last
// weights.
template <class T>
bool rows_are_contiguous(const Weight<T>& w) {
  return (w.in_stride == 1 || w.in == 1) && (w.x_stride == w.in || w.width == 1) &&
         (w.y_stride == w.width * w.in || w.height == 1);
}

// The same for a contiguous convolution's weight: the taps of a channel lie together.
template <class T>
bool taps_are_contiguous(const Weight<T>& w) {
  return (w.x_stride == 1 || w.width == 1) && (w.y_stride == w.width || w.height == 1) &&
         (w.in_stride == w.height * w.width || w.in == 1);
}

// A weight whose rows lie in one of these orders, as a linear one.
template <class T>
Weight<T> as_linear(const Weight<T>& w) {
  return {w.data, w.rows, w.cols(), 1, 1, w.row_stride, 1, 0, 0};
}

}  // namespace partkernels::cuda
