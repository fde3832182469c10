// linear in bfloat16 by AMX, for many rows of x, and a depth that is not 0: they are packed once, in tiles, and stay in
// the second-level cache; panels of the weight are rebuilt one after another, and each meets all of them.
#pragma once

#include "pack.h"
#include "store_rows.h"
#include "tile_rows.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

// A panel: kPanelCols outputs by kStrip of the depth, as pairs; two tiles of a step of depth lie side by side.
constexpr int64_t kPanelCols = 2 * kTile;
constexpr int64_t kTwo = 2 * kTile;  // rows of two tiles
// x is packed for so many rows, or half of them and twice the depth; both sums and x then fit the second-level cache.
constexpr int64_t kMostRows = 512;
constexpr int64_t kPackedEntries = kMostRows * 1024;
// Where x is packed several times, sums of so many outputs are kept meanwhile, or of twice as many and half the rows.
constexpr int64_t kKeptCols = 256;

struct alignas(64) TilesWorkspace {
  bfloat16 x[kPackedEntries];
  Pair panel[kStrip / 2 * kPanelCols];
  float sums[kMostRows * kKeptCols];
};

inline TilesWorkspace& tiles_workspace() {
  thread_local const std::unique_ptr<TilesWorkspace> own(new TilesWorkspace);
  return *own;
}

// Rebuilds a panel, `depth` by `rows` outputs. What is beyond the depth is zero; what is beyond the rows is anything.
inline void make_panel(const Rebuilder<bfloat16>& rebuild, int64_t out, int64_t rows, int64_t k, int64_t depth,
                       Offset next, Pair* panel) {
  for (int64_t first = 0; first < rows; first += kTile) {
    alignas(64) TileRows rebuilt;
    const int64_t some = std::min(kTile, rows - first);
    const Rows<bfloat16> made = tile_rows(rebuild, out + first, some, k, depth, next, rebuilt);
    for (int64_t c = 0; c < depth; c += kTileEntries) {
      transpose16(reinterpret_cast<const uint32_t*>(made.data + c), made.stride / 2,
                  reinterpret_cast<uint32_t*>(panel + c / 2 * kPanelCols + first), kPanelCols);
    }
  }
}

// Two tiles of rows of each step of depth, one tile after the other.
constexpr LeftBlock kPackedTiles{kTile, kTile * kTile, kTwo * kTile};

// packed[two tiles of rows][step of depth]: x[row : row + rows, k : k + d], zeros up to whole tiles.
inline void pack_tiles(const Matrix<const bfloat16>& x, int64_t row, int64_t rows, int64_t k, int64_t d,
                       bfloat16* packed) {
  for (int64_t r = 0; r < blocks_of(rows, kTwo) * kTwo; ++r) {
    const int64_t steps = blocks_of(d, kTileEntries);
    bfloat16* to = packed + (r / kTwo * steps * kTwo + r % kTwo) * kTileEntries;
    const bfloat16* from = x.data + (row + std::min(r, rows - 1)) * x.row_stride + k * x.col_stride;
    for (int64_t c = 0; c < d; c += kTileEntries, to += kTwo * kTileEntries, from += kTileEntries * x.col_stride) {
      if (r < rows && x.col_stride == 1 && d - c >= kTileEntries) {
        std::memcpy(to, from, kTileEntries * sizeof(bfloat16));
        continue;
      }
      const int64_t some = r < rows ? std::min(kTileEntries, d - c) : 0;
      copy(from, x.col_stride, some, to);
      std::fill(to + some, to + kTileEntries, bfloat16{0});
    }
  }
}

inline void linear_by_tiles(const Matrix<const bfloat16>& x, const Subnetwork<bfloat16>& w, const bfloat16* bias,
                            const Matrix<bfloat16>& y, const ParallelFor& parallel_for) {
  const Rebuilder<bfloat16> rebuild(w);
  const int64_t depth = x.cols, outs = w.weight.rows;
  const int64_t most_rows = depth <= kPackedEntries / kMostRows ? kMostRows : kMostRows / 2;
  const int64_t most_depth = kPackedEntries / most_rows;
  const bool is_packed_once = depth <= most_depth;
  const Tasks<kPanelCols> tasks(x.rows, even_block(x.rows, kTwo, most_rows), outs);

  parallel_for(tasks.count(), [&](int64_t begin, int64_t end) {
    TilesWorkspace& space = tiles_workspace();
    const Tiles tiles;
    // One panel, of a part of the depth that is packed, by all rows.
    const auto multiply_panel = [&](int64_t first, int64_t rows, int64_t out, int64_t cols, int64_t start, int64_t stop,
                                    float* sums) {
      const int64_t steps = blocks_of(stop - start, kTileEntries);
      for (int64_t k = start; k < stop; k += kStrip) {
        const int64_t d = std::min(kStrip, stop - k);
        const Offset next = k + kStrip < stop ? Offset{0, kStrip} : Offset{kPanelCols, start - k};
        make_panel(rebuild, out, cols, k, d, next, space.panel);
        for (int64_t r = 0; r < rows; r += kTwo) {
          float* const product = sums + r * kPanelCols;
          const bfloat16* const left = space.x + (r / kTwo * steps + (k - start) / kTileEntries) * kTwo * kTileEntries;
          multiply_tiles<2, kPackedTiles>(reinterpret_cast<const Pair*>(left), space.panel,
                                          blocks_of(d, kTileEntries) * kTile, k > 0, product, kPanelCols);
          if (k + d == depth) {
            store_rows(y, first + r, std::min(kTwo, rows - r), out, cols, product, kPanelCols, bias);
          }
        }
      }
    };
    tasks.for_each(begin, end, [&](int64_t first, int64_t last, int64_t first_out, int64_t last_out) {
      const int64_t outs_of_block =
          is_packed_once ? last_out - first_out
                         : even_block(last_out - first_out, kPanelCols, kKeptCols * kMostRows / most_rows);
      for (int64_t block = first_out; block < last_out; block += outs_of_block) {
        for (int64_t start = 0; start < depth; start += most_depth) {
          const int64_t stop = std::min(depth, start + most_depth);
          pack_tiles(x, first, last - first, start, stop - start, space.x);
          for (int64_t out = block; out < std::min(last_out, block + outs_of_block); out += kPanelCols) {
            multiply_panel(first, last - first, out, std::min(kPanelCols, last_out - out), start, stop,
                           space.sums + (is_packed_once ? 0 : (out - block) * most_rows));
          }
        }
      }
    });
  });
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
