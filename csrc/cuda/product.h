// A product of matrices, one of them perhaps a subnetwork's weight, as kernels get it.
#pragma once

#include "rebuild.h"

namespace partkernels::cuda {

// y = x w^T; grad_x = grad_y w; grad_w = grad_y^T x.
enum class Work { forward, grad_input, grad_weight };

// The tiles of a result in an order that keeps what they share in the second-level cache: bands of eight down.
PARTKERNELS_DEVICE void tile_of(int index, int down, int across, int* row, int* col) {
  constexpr int kBand = 8;
  const int band = index / (kBand * across);
  const int height = min_of(kBand, down - band * kBand);
  const int within = index - band * kBand * across;
  *row = band * kBand + within % height;
  *col = within / height;
}

// A matrix as a kernel sees it.
template <class T>
struct Operand {
  const T* data;
  int64_t row_stride, col_stride;
  int rows, cols;
};

// What a kernel needs to rebuild a weight [rows, cols].
template <class T>
struct Rebuilt {
  Operand<T> weight = {}, stored = {};
  const uint8_t* map = nullptr;
  int64_t row_bytes = 0;
  int bits = 0, active = 0;
  Threshold threshold = {};
  Defaults defaults = {};
};

// out [down, across] = the sums of so many terms.
template <class T>
struct Product {
  Operand<T> left = {};    // x; grad_y; grad_y
  Operand<T> right = {};   // of grad_weight, x
  Rebuilt<T> weight = {};  // of the others; of grad_weight, its map alone
  const T* bias = nullptr;
  T* out = nullptr;
  int64_t row_stride = 0, col_stride = 0;
  int down = 0, across = 0, terms = 0;
  int update = 0;  // of grad_weight
  int stages = 0;  // of tiles in shared memory
};

// Stores an entry of the result, if it is one: with the bias, or if its partition learns.
template <class T, Work kWork, class Sum>
PARTKERNELS_DEVICE void store_result(const Product<T>& p, int row, int col, Sum sum) {
  if (row >= p.down || col >= p.across) return;
  if constexpr (kWork == Work::forward) {
    if (p.bias != nullptr) sum += as_number(p.bias[col]);
  }
  if constexpr (kWork == Work::grad_weight) {
    if (id_at(p.weight.map + row * p.weight.row_bytes, col, p.weight.bits) != p.update - 1) sum = 0;
  }
  p.out[row * p.row_stride + col * p.col_stride] = from_number<T>(sum);
}

}  // namespace partkernels::cuda
