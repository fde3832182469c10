// A blocked matrix product whose operands are packed, and whose result is stored, by the caller's functions.
//
// An operator says what its operands are by packing blocks of them: read from a tensor, gathered from an image, or
// rebuilt from a packed map. No operand ever exists whole.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "multiply.h"
#include "partkernels/cpu.h"

namespace partkernels::cpu {

// One thread's blocks. Kept from call to call: allocating it costs more than a small product.
template <class Acc>
struct alignas(64) Workspace {
  // If the left operand's rows fit into this many blocks, they are packed once for all columns of the product. Four
  // in float hold the weights of most convolutions; two in double keep the workspace under 1 MiB.
  static constexpr int64_t kLeftBlocks = sizeof(Acc) == 4 ? 4 : 2;
  Acc left[kLeftBlocks][kRows * kDepth];
  Acc right[kDepth * kRightStride];
  Acc product[kRows * kCols];
};
static_assert(sizeof(Workspace<double>) <= 1 << 20);

// Blocks of depth whose products are summed one after another; sums of so many are then added. Without this second
// level the error is up to 2.6 times that of MKL's product at depth 4096, with it at most 0.9 times.
constexpr int64_t kFold = 4;

template <class Acc>
Workspace<Acc>& workspace() {
  thread_local const std::unique_ptr<Workspace<Acc>> own(new Workspace<Acc>());
  return *own;
}

// How a left block lies in memory.
enum class Layout { row_major, depth_major };

constexpr int64_t left_stride(Layout layout) { return layout == Layout::row_major ? kDepth : kRows; }

// total = product, or total += product, of m x n entries, rows kCols apart.
template <class Acc>
void fold(const Acc* product, int64_t m, int64_t n, bool accumulate, Acc* total) {
  for (int64_t r = 0; r < m * kCols; r += kCols) {
    for (int64_t c = r; c < r + n; ++c) total[c] = accumulate ? total[c] + product[c] : product[c];
  }
}

// product[rows, cols] = left[rows, depth] right[depth, cols].
//
// pack_left(i, m, k, d, block): packs left[i : i + m, k : k + d]; its rows, or in depth_major its columns, are
// left_stride(layout) apart.
// pack_right(k, d, j, n, block): packs right[k : k + d, j : j + n], rows kRightStride apart.
// store(i, m, j, n, block): takes product[i : i + m, j : j + n], rows kCols apart.
template <class Acc, Layout layout, class PackLeft, class PackRight, class Store>
void gemm(int64_t rows, int64_t cols, int64_t depth, const PackLeft& pack_left, const PackRight& pack_right,
          const Store& store, const ParallelFor& parallel_for) {
  const auto blocks = [](int64_t size, int64_t block) { return (size + block - 1) / block; };
  const int64_t row_blocks = blocks(rows, kRows);
  const int64_t col_blocks = blocks(cols, kCols);
  const bool keep_left = blocks(depth, kDepth) <= Workspace<Acc>::kLeftBlocks;
  const bool folds = depth > kFold * kDepth;
  static_assert(kFold >= Workspace<double>::kLeftBlocks && kFold >= Workspace<float>::kLeftBlocks && kCols <= kDepth);
  constexpr int64_t row_stride = layout == Layout::row_major ? left_stride(layout) : 1;
  constexpr int64_t depth_stride = layout == Layout::row_major ? 1 : left_stride(layout);

  parallel_for(row_blocks * col_blocks, [&](int64_t begin, int64_t end) {
    Workspace<Acc>& space = workspace<Acc>();
    int64_t kept = -1;
    for (int64_t block = begin; block < end; ++block) {
      const int64_t i = block / col_blocks * kRows;
      const int64_t j = block % col_blocks * kCols;
      const int64_t m = std::min(kRows, rows - i);
      const int64_t n = std::min(kCols, cols - j);
      Acc* const total = space.left[1];  // free: what folds is too deep to be kept
      if (depth == 0) std::memset(space.product, 0, sizeof(space.product));
      for (int64_t k = 0; k < depth; k += kDepth) {
        const int64_t d = std::min(kDepth, depth - k);
        Acc* const left = space.left[keep_left ? k / kDepth : 0];
        if (!keep_left || kept != i) pack_left(i, m, k, d, left);
        pack_right(k, d, j, n, space.right);
        const bool starts = folds ? k % (kFold * kDepth) == 0 : k == 0;
        multiply(LeftBlock<Acc>{left, row_stride, depth_stride}, space.right, m, n, d, !starts, space.product);
        const bool ends = (k + kDepth) % (kFold * kDepth) == 0 || k + d == depth;
        if (folds && ends) fold(space.product, m, n, /*accumulate=*/k >= kFold * kDepth, total);
      }
      kept = i;
      store(i, m, j, n, folds ? total : space.product);
    }
  });
}

}  // namespace partkernels::cpu
