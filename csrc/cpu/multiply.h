// The multiplication of two packed blocks: the only place where floating-point work is done.
#pragma once

#include <cstdint>

namespace partkernels::cpu {

// A block of a product has at most kRows x kCols entries and kDepth terms. In float, a left block takes 96 KiB, a right
// block 208 KiB and a product 72 KiB: together they fit the second-level cache.
constexpr int64_t kRows = 96;
constexpr int64_t kCols = 192;
constexpr int64_t kDepth = 256;
// 16 more than kCols: rows at a power of two apart would fall into the same few sets of the first-level cache.
constexpr int64_t kRightStride = kCols + 16;

// The left block: entry (i, k) is at data[i * row_stride + k * depth_stride].
template <class T>
struct LeftBlock {
  const T* data;
  int64_t row_stride, depth_stride;
};

// product[i][j] (+)= sum over k in [0, depth) of left(i, k) * right[k * kRightStride + j], for i in [0, rows) and j in
// [0, cols), both rounded up to whole register tiles: all three blocks must be that large. product has kCols columns.
void multiply(LeftBlock<float> left, const float* right, int64_t rows, int64_t cols, int64_t depth, bool accumulate,
              float* product);
void multiply(LeftBlock<double> left, const double* right, int64_t rows, int64_t cols, int64_t depth, bool accumulate,
              double* product);

}  // namespace partkernels::cpu
