// Kernel arguments of y = x w^T with a subnetwork's weight.
#pragma once

#include "rebuild.h"

namespace partkernels::cuda {

// A matrix as a kernel argument.
template <class T>
struct Operand {
  const T* data;
  int64_t row_stride, col_stride;
  int rows, cols;
};

// The data from which a kernel rebuilds a weight [rows, cols].
template <class T>
struct Rebuilt {
  Operand<T> weight = {}, stored = {};
  const uint8_t* map = nullptr;
  int64_t row_bytes = 0;
  int bits = 0;
  Threshold threshold = {};
  Defaults defaults = {};
};

// out [down, across] = sums of `terms` terms each.
template <class T>
struct Product {
  Operand<T> left = {};  // x
  Rebuilt<T> weight = {};
  const T* bias = nullptr;
  T* out = nullptr;
  int64_t row_stride = 0, col_stride = 0;
  int down = 0, across = 0, terms = 0;
  int stages = 0;  // of tiles in shared memory
  // Parts of each sum that blocks write to partial [shares, down, across]; a single one is written to out.
  int shares = 1;
  float* partial = nullptr;
};

// A unit of a block's work: a tile of the result, summed over the groups [first, last) of 64 terms.
struct Task {
  int row, col, share, first, last;
};

// The order of a share's tiles keeps their common operands in the second-level cache: bands of eight tiles down.
template <class T>
PARTKERNELS_DEVICE Task task_of(const Product<T>& p, int index, int tiles_down, int tiles_across) {
  constexpr int kBand = 8;
  const int groups = divide_up(p.terms, kGroup), each = divide_up(groups, p.shares);
  const int share = index / (tiles_down * tiles_across), tile = index - share * tiles_down * tiles_across;
  const int band = tile / (kBand * tiles_across), within = tile - band * kBand * tiles_across;
  const int height = min_of(kBand, tiles_down - band * kBand);
  return {band * kBand + within % height, within / height, share, share * each, min_of((share + 1) * each, groups)};
}

// The address of a row of a share's sums.
template <class T>
PARTKERNELS_DEVICE float* partial_row(const Product<T>& p, int share, int row) {
  return p.partial + (int64_t{share} * p.down + row) * p.across;
}

// Stores an entry of the result with its bias.
template <class T>
PARTKERNELS_DEVICE void store_result(const Product<T>& p, int row, int col, float sum) {
  if (p.bias != nullptr) sum += as_float(p.bias[col]);
  p.out[row * p.row_stride + col * p.col_stride] = from_float<T>(sum);
}

}  // namespace partkernels::cuda
