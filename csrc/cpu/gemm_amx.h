// A bfloat16 product with AMX. The left operand is packed once, in tiles, and stays in the second-level cache. Panels
// of the right operand are made one after another, and each is multiplied with all of the left operand from the
// first-level cache.
#pragma once

#include "gemm.h"
#include "rebuild.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

constexpr int64_t kPanelCols = kPanel<Pair>;
constexpr int64_t kTwo = 2 * kTile;  // rows of two tiles
// The left operand is packed for this many rows, or for half of them with twice the depth; it and the sums then fit the
// second-level cache.
constexpr int64_t kMostRows = 512;
constexpr int64_t kPackedEntries = kMostRows * 1024;
// If it is packed several times, the sums of this many columns are kept meanwhile, or of twice as many for half the
// rows.
constexpr int64_t kKeptCols = 256;

// The maximum number of columns of the right operand that are made at once, and the distance of their panels in units.
constexpr int64_t kMostMade = 2 * kTileCols;
constexpr int64_t kPanelUnits = kStrip / kUnitDepth<Pair> * kPanelCols;

struct alignas(64) TilesWorkspace {
  bfloat16 left[kPackedEntries];
  Pair panels[kMostMade / kPanelCols * kPanelUnits];
  float sums[kMostRows * kKeptCols];
};

inline TilesWorkspace& tiles_workspace() {
  thread_local const std::unique_ptr<TilesWorkspace> own(new TilesWorkspace);
  return *own;
}

// The packed left operand: two tiles of rows for each step of depth, one after the other.
constexpr LeftBlock kPackedTiles{kTile, kTile * kTile, kTwo * kTile, true};

// The begin of the tile of row r and a step of depth, or of row r within it.
inline bfloat16* packed_tile(bfloat16* packed, int64_t steps, int64_t r, int64_t step) {
  return packed + ((r / kTwo * steps + step) * kTwo + r % kTwo) * kTileEntries;
}

// product[rows, cols] = left[rows, depth] right[depth, cols]; the depth, in entries, is not 0.
//
// pack_left(i, m, k, d, packed): packs left[i : i + m, k : k + d] in tiles.
// make_panels(k, d, j, n, next, panels): packs right[k : k + d, j : j + n] in panels, kMade columns at once. The block
// that is made next begins `next` further on. Like pack_left, it appends zeros to the depth, up to whole tiles.
// store(i, m, j, n, sums): stores product[i : i + m, j : j + n], kStored columns at once, rows kStored apart.
// j is a multiple of kTileCols, or of the number of columns at once if that is smaller.
template <int64_t kMade, int64_t kStored, class PackLeft, class MakePanels, class Store>
void gemm_amx(int64_t rows, int64_t cols, int64_t depth, const PackLeft& pack_left, const MakePanels& make_panels,
              const Store& store, const ParallelFor& parallel_for) {
  static_assert(kMade <= kMostMade && kStored % kPanelCols == 0 && kMade % kStored == 0 && kKeptCols % kMade == 0);
  const int64_t most_rows = depth <= kPackedEntries / kMostRows ? kMostRows : kMostRows / 2;
  const int64_t most_depth = kPackedEntries / most_rows;
  const bool is_packed_once = depth <= most_depth;
  const Tasks<std::min(kMade, kTileCols)> tasks(rows, even_block(rows, kTwo, most_rows), cols);

  parallel_for(tasks.count(), [&](int64_t begin, int64_t end) {
    TilesWorkspace& space = tiles_workspace();
    const Tiles tiles;
    // Multiplies panels of n columns with all m rows, over the part of the depth that is packed.
    const auto multiply_panels = [&](int64_t i, int64_t m, int64_t j, int64_t n, int64_t start, int64_t stop,
                                     float* sums) {
      const int64_t steps = blocks_of(stop - start, kTileEntries);
      for (int64_t k = start; k < stop; k += kStrip) {
        const int64_t d = std::min(kStrip, stop - k);
        const Offset next = k + kStrip < stop ? Offset{kStrip, 0} : Offset{start - k, kMade};
        make_panels(k, d, j, n, next, space.panels);
        for (int64_t c = 0; c < n; c += kPanelCols) {
          // The first of the columns that are stored together with the panel, their number, and their sums.
          const int64_t together = c / kStored * kStored, stored = std::min(kStored, n - together);
          float* const to = sums + together * blocks_of(m, kTwo) * kTwo;
          const bool is_last = k + d == depth && c + kPanelCols >= together + stored;
          for (int64_t r = 0; r < m; r += kTwo) {
            const bfloat16* const left = packed_tile(space.left, steps, r, (k - start) / kTileEntries);
            const auto multiply = m - r > kTile ? multiply_tiles<2, kPackedTiles> : multiply_tiles<1, kPackedTiles>;
            multiply(reinterpret_cast<const Pair*>(left), space.panels + c / kPanelCols * kPanelUnits,
                     blocks_of(d, kTileEntries) * kTile, k > 0, to + r * kStored + c - together, kStored);
            if (is_last) store(i + r, std::min(kTwo, m - r), j + together, stored, to + r * kStored);
          }
        }
      }
    };
    tasks.for_each(begin, end, [&](int64_t first, int64_t last, int64_t first_col, int64_t last_col) {
      const int64_t cols_of_block = is_packed_once
                                        ? last_col - first_col
                                        : even_block(last_col - first_col, kMade, kKeptCols * kMostRows / most_rows);
      for (int64_t block = first_col; block < last_col; block += cols_of_block) {
        for (int64_t start = 0; start < depth; start += most_depth) {
          const int64_t stop = std::min(depth, start + most_depth);
          pack_left(first, last - first, start, stop - start, space.left);
          for (int64_t j = block; j < std::min(last_col, block + cols_of_block); j += kMade) {
            multiply_panels(first, last - first, j, std::min(kMade, last_col - j), start, stop,
                            space.sums + (is_packed_once ? 0 : (j - block) * most_rows));
          }
        }
      }
    });
  });
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
