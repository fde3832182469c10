// A blocked matrix product. The caller's functions pack the operands and store the result.
//
// An operator defines its operands by packing blocks of them: read from a tensor, gathered from an image, or rebuilt
// from a packed map. No operand is ever materialised.
#pragma once

#include "microkernel.h"
#include "weight_tile.h"
#if defined(PARTKERNELS_AMX)
#include "multiply_amx.h"
#endif

namespace partkernels::cpu::PARTKERNELS_ISA {

// A block of a product has kBatch x kCols entries, computed kRows x kCols at a time from kDepth units of depth. The
// left block takes 96 KiB, the right one 256 and the product 360, so that they stay in the second-level cache.
// Processors with AMX have 2 MiB of it, and compute a product so fast that packing an operand must serve more rows:
// there the sizes are 96, 128 and 704.
constexpr int64_t kCols = 256;
template <class Unit>
constexpr int64_t kBatch = (kHasTiles ? 2816 : 1440) / sizeof(Unit);
// Column blocks start at multiples of a tile's width.
static_assert(kRows % kTall == 0 && kBatch<double> % kTall == 0 && kCols % kTileCols == 0);

// The number of left blocks with memory: gemm_in_output.h packs all rows of a batch.
constexpr int64_t kLeftBlocks = kHasTiles ? 1 : 8;

// One thread's blocks, kept between calls: allocating them costs more than a small product.
template <class Unit>
struct alignas(64) Workspace {
  static_assert(kTileCols % kPanel<Unit> == 0);
  Unit left[kLeftBlocks * kRows * kDepth<Unit>];
  Unit right[kCols * kDepth<Unit>];
  Sum<Unit> product[kBatch<Unit> * kCols];
};
static_assert(sizeof(Workspace<float>) <= 3 << 19 && sizeof(Workspace<double>) <= 3 << 19);

template <class Unit>
Workspace<Unit>& workspace() {
  thread_local const std::unique_ptr<Workspace<Unit>> own(new Workspace<Unit>);
  return *own;
}

// The size of equal blocks of a dimension: a multiple of `unit`, and at most `most`.
inline int64_t even_block(int64_t total, int64_t unit, int64_t most) {
  const int64_t units = std::max<int64_t>(1, blocks_of(total, unit));
  return blocks_of(units, blocks_of(units, most / unit)) * unit;
}

// The tasks of a product: Unit columns of a batch of rows each. They are small, so that many threads get some; a thread
// computes its consecutive tasks in the same rows together.
template <int64_t Unit>
class Tasks {
 public:
  // batch: the number of rows of a batch.
  Tasks(int64_t rows, int64_t batch, int64_t cols)
      : rows_(rows), batch_(batch), cols_(cols), across_(blocks_of(cols, Unit)) {}

  int64_t count() const { return blocks_of(rows_, batch_) * across_; }

  // Calls use(first, last, start, stop) with the rows and the columns of the tasks in [begin, end).
  template <class Use>
  void for_each(int64_t begin, int64_t end, const Use& use) const {
    for (int64_t task = begin, next; task < end; task = next) {
      const int64_t batch = task / across_, start = task % across_;
      next = std::min(end, (batch + 1) * across_);
      use(batch * batch_, std::min(rows_, (batch + 1) * batch_), start * Unit,
          std::min(cols_, (start + next - task) * Unit));
    }
  }

 private:
  int64_t rows_, batch_, cols_, across_;
};

// product[rows, cols] = left[rows, depth] right[depth, cols], depth in entries.
//
// most: rows of a block. kBatch, so that the right operand is packed as rarely as possible; or kRows if packing is
// cheap, so that the product stays in a closer cache.
// pack_left(i, m, k, d, block): packs left[i : i + m, k : k + d] in the layout.
// pack_right(k, d, j, n, block): packs right[k : k + d, j : j + n] in panels. j is a multiple of kTileCols.
// store(i, m, j, n, block): stores product[i : i + m, j : j + n], rows kCols apart.
template <class Unit, Layout layout, class PackLeft, class PackRight, class Store>
void gemm(int64_t rows, int64_t cols, int64_t depth, int64_t most, const PackLeft& pack_left,
          const PackRight& pack_right, const Store& store, const ParallelFor& parallel_for) {
  constexpr int64_t kStep = kDepth<Unit> * kUnitDepth<Unit>;
  const Tasks<kTileCols> tasks(rows, even_block(rows, kTall, std::min(most, kBatch<Unit>)), cols);

  parallel_for(tasks.count(), [&](int64_t begin, int64_t end) {
    Workspace<Unit>& space = workspace<Unit>();
    [[maybe_unused]] const Tiles tiles{};
    const auto multiply_block = [&](int64_t first, int64_t last, int64_t j, int64_t n) {
      if (depth == 0) std::memset(space.product, 0, sizeof(space.product));
      if (rows <= kTall) {
        // The left operand is small, so several blocks of its depth are kept. The right one, which comes from memory,
        // is then read in longer runs.
        constexpr int64_t kBlock = kTall * left_row_stride<Unit, layout>;
        constexpr int64_t kStretch = kRows / kTall * kStep;
        for (int64_t start = 0; start < depth; start += kStretch) {
          const int64_t stop = std::min(depth, start + kStretch);
          for (int64_t k = start; k < stop; k += kStep) {
            pack_left(first, rows, k, std::min(kStep, stop - k), space.left + (k - start) / kStep * kBlock);
          }
          for (int64_t c = 0; c < n; c += kTileCols) {
            const int64_t some = std::min(kTileCols, n - c);
            for (int64_t k = start; k < stop; k += kStep) {
              const int64_t d = std::min(kStep, stop - k);
              pack_right(k, d, j + c, some, space.right);
              multiply<Unit, layout>(space.left + (k - start) / kStep * kBlock, space.right, rows, some,
                                     blocks_of(d, kUnitDepth<Unit>), k > 0, space.product + c, kCols);
            }
          }
        }
      } else {
        for (int64_t k = 0; k < depth; k += kStep) {
          const int64_t d = std::min(kStep, depth - k);
          pack_right(k, d, j, n, space.right);
          for (int64_t i = first; i < last; i += kRows) {
            const int64_t m = std::min(kRows, last - i);
            pack_left(i, m, k, d, space.left);
            multiply<Unit, layout>(space.left, space.right, m, n, blocks_of(d, kUnitDepth<Unit>), k > 0,
                                   space.product + (i - first) * kCols, kCols);
          }
        }
      }
      store(first, last - first, j, n, space.product);
    };
    tasks.for_each(begin, end, [&](int64_t first, int64_t last, int64_t start, int64_t stop) {
      const int64_t cols_of_block = even_block(stop - start, kTileCols, kCols);
      for (int64_t j = start; j < stop; j += cols_of_block) {
        multiply_block(first, last, j, std::min(cols_of_block, stop - j));
      }
    });
  });
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
