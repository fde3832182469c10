// Operands of the kernels on a CPU and on a GPU: pointers, sizes and strides.
//
// Strides count entries and may be 0 or negative.
#pragma once

#include <cstdint>

#include "partkernels/bfloat16.h"
#include "partkernels/defaults.h"

namespace partkernels {

template <class T>
struct Matrix {
  T* data;
  int64_t rows, cols;
  int64_t row_stride, col_stride;
};

// A weight [rows, in, height, width] (height = width = 1 for linear layers), seen as a matrix with columns in the order
// (y, x, i), input channels innermost.
template <class T>
struct Weight {
  T* data;
  int64_t rows, in, height, width;
  int64_t row_stride, in_stride, y_stride, x_stride;

  int64_t cols() const { return in * height * width; }
};

// Whether the entries of a row are contiguous in the order of the map's columns, as in linear and channels_last
// weights.
template <class T>
bool rows_are_contiguous(const Weight<T>& w) {
  return (w.in_stride == 1 || w.in == 1) && (w.x_stride == w.in || w.width == 1) &&
         (w.y_stride == w.width * w.in || w.height == 1);
}

// Whether the entries of a row are contiguous with the taps of a channel together, as in a contiguous convolution
// weight.
template <class T>
bool taps_are_contiguous(const Weight<T>& w) {
  return (w.x_stride == 1 || w.width == 1) && (w.y_stride == w.width || w.height == 1) &&
         (w.in_stride == w.height * w.width || w.in == 1);
}

// Which partition owns each entry of a weight.
struct Owners {
  const uint8_t* map;
  int64_t row_bytes;
  int bits;

  const uint8_t* row(int64_t r) const { return map + r * row_bytes; }
};

// The weight of subnetwork `active`: the weight's own entries in partitions 1..active, and defaults elsewhere.
template <class T>
struct Subnetwork {
  Weight<const T> weight;
  Owners owners;
  int count, active;
  Defaults defaults;
  Weight<const T> stored;  // for DefaultKind::stored
};

}  // namespace partkernels
