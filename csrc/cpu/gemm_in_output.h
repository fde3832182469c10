// A blocked matrix product that accumulates in the output.
//
// For an output of the accumulator's type with contiguous rows. Compared with gemm.h, no sum is copied, and a thread's
// column blocks are computed together along the depth, so that the left operand is packed once for all of them.
#pragma once

#include "gemm.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

// Columns of the output that are finished at once.
constexpr int64_t kMostCols = 4 * kCols;

// Marks the sums of a few rows that are stored.
struct Marks {
  uint64_t words[kTall][kMarksOfRow / 8];
  uint64_t end;  // padding: marks are read 4 bytes at a time
  static_assert(kMostCols <= 8 * kMarksOfRow);

  StoreMarked at(int64_t col) const {
    return {reinterpret_cast<const uint8_t*>(words) + col / 8, static_cast<int>(col % 8)};
  }
};

// All sums are stored; also a function that returns this for any rows.
struct NoMarks {
  StoreAll at(int64_t) const { return {}; }
  NoMarks operator()(int64_t, int64_t, int64_t, int64_t) const { return {}; }
};

// output[rows, cols] = left[rows, depth] right[depth, cols]; the depth, in entries, is not 0.
//
// panel_depth: units of depth for which the right block's panels have memory: kDepth, or the depth if that is smaller.
// pack_left, pack_right: as in gemm.
// marks(i, m, j, n): Marks or NoMarks of output[i : i + m, j : j + n], a few rows of a task's columns.
// finish(i, m, j, n): called when these are stored and still in a close cache.
template <class Unit, Layout layout, class PackLeft, class PackRight, class MarksOf, class Finish>
void gemm_in_output(int64_t depth, const Matrix<Unit>& output, int64_t panel_depth, const PackLeft& pack_left,
                    const PackRight& pack_right, const MarksOf& marks, const Finish& finish,
                    const ParallelFor& parallel_for) {
  static_assert(kLeftBlocks * kRows * kPanel<Unit> * sizeof(Unit) <= sizeof(Workspace<Unit>::product));
  // If there are few columns, threads share the rows.
  const int64_t most = output.cols <= kCols ? kBatch<Unit> : kLeftBlocks * kRows;
  const Tasks<kTileCols> tasks(output.rows, even_block(output.rows, kTall, most), output.cols);
  // If the depth is small, more columns fit into the workspace: longer pieces of rows are stored in less time.
  const int64_t most_cols = std::min(kMostCols, kCols * kDepth<Unit> / panel_depth / kTileCols * kTileCols);

  parallel_for(tasks.count(), [&](int64_t begin, int64_t end) {
    Workspace<Unit>& space = workspace<Unit>();
    tasks.for_each(begin, end, [&](int64_t first, int64_t last, int64_t start, int64_t stop) {
      const int64_t cols_of_block = even_block(stop - start, kTileCols, most_cols);
      for (int64_t k = 0; k < depth; k += kDepth<Unit>) {
        const int64_t d = std::min(kDepth<Unit>, depth - k);
        const bool is_last = k + d == depth;
        // Multiplies some rows with a panel of n columns. The sums of an incomplete panel are accumulated elsewhere.
        const auto multiply_panel = [&](const Unit* left, const Unit* right, int64_t i, int64_t m, int64_t j, int64_t n,
                                        const auto& stored) {
          Unit* const to = output.data + i * output.row_stride + j;
          if (n == kPanel<Unit>) {
            multiply_rows<Unit, layout>(m, left, right, d, k > 0, to, output.row_stride, stored);
            return;
          }
          Unit* const sums = space.product + (i - first) * kPanel<Unit>;
          multiply_rows<Unit, layout>(m, left, right, d, k > 0, sums, kPanel<Unit>, stored);
          if (!is_last) return;
          for (int64_t r = 0; r < m; ++r) std::copy_n(sums + r * kPanel<Unit>, n, to + r * output.row_stride);
        };
        for (int64_t block = start; block < stop; block += cols_of_block) {
          const int64_t end_of_block = std::min(stop, block + cols_of_block), n = end_of_block - block;
          pack_right(k, d, block, n, space.right);
          for (int64_t i = first; i < last; i += kRows) {
            const int64_t m = std::min(kRows, last - i);
            Unit* const left = space.left + (i - first) * kDepth<Unit>;
            if (block == start) pack_left(i, m, k, d, left);
            // A few rows at a time, since each row is in a different page.
            for (int64_t r = 0; r < m; r += kTall) {
              const int64_t few = std::min(kTall, m - r);
              const auto multiply_panels = [&](const auto& stored) {
                for (int64_t j = block; j < end_of_block; j += kPanel<Unit>) {
                  multiply_panel(left + r * left_row_stride<Unit, layout>, space.right + (j - block) * panel_depth,
                                 i + r, few, j, std::min(kPanel<Unit>, end_of_block - j), stored.at(j - block));
                }
              };
              if (is_last) {
                multiply_panels(marks(i + r, few, block, n));
                finish(i + r, few, block, n);
              } else {
                multiply_panels(NoMarks{});
              }
            }
          }
        }
      }
    });
  });
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
