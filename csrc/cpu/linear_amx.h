// linear and its gradients in bfloat16 with AMX, for all but small batches.
#pragma once

#include "gemm_amx.h"
#include "masked_store.h"
#include "pack.h"
#include "store_rows.h"
#include "tile_rows.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

// Packs x[row : row + rows, k : k + d] in tiles.
inline void pack_tiles(const Matrix<const bfloat16>& x, int64_t row, int64_t rows, int64_t k, int64_t d,
                       bfloat16* packed) {
  for (int64_t r = 0; r < rows; ++r) {
    bfloat16* to = packed_tile(packed, blocks_of(d, kTileEntries), r, 0);
    const bfloat16* from = x.data + (row + r) * x.row_stride + k * x.col_stride;
    for (int64_t c = 0; c < d; c += kTileEntries, to += kTwo * kTileEntries, from += kTileEntries * x.col_stride) {
      if (x.col_stride == 1 && d - c >= kTileEntries) {
        std::memcpy(to, from, kTileEntries * sizeof(bfloat16));
        continue;
      }
      const int64_t some = std::min(kTileEntries, d - c);
      copy(from, x.col_stride, some, to);
      std::fill(to + some, to + kTileEntries, bfloat16{0});
    }
  }
}

// Packs the transpose of x[k : k + d, col : col + cols] in tiles.
inline void pack_transposed_tiles(const Matrix<const bfloat16>& x, int64_t k, int64_t d, int64_t col, int64_t cols,
                                  bfloat16* packed) {
  for (int64_t r = 0; r < d; r += kTileEntries) {
    for (int64_t c = 0; c < cols; c += kTile) {
      alignas(64) Pair pairs[kTile][kTile] = {};
      pack_depth_rows<Pair>(x, k + r, std::min(kTileEntries, d - r), col + c, std::min(kTile, cols - c),
                            [&](int64_t unit) { return pairs[unit]; });
      bfloat16* const tile = packed_tile(packed, blocks_of(d, kTileEntries), c, r / kTileEntries);
      transpose16(reinterpret_cast<const uint32_t*>(pairs), kTile, reinterpret_cast<uint32_t*>(tile), kTile);
    }
  }
}

// y = x w^T + bias: rows of w are rebuilt a tile at a time and transposed.
inline void linear_amx(const Matrix<const bfloat16>& x, const Subnetwork<bfloat16>& w, const bfloat16* bias,
                       const Matrix<bfloat16>& y, const ParallelFor& parallel_for) {
  const Rebuilder<bfloat16> rebuild(w);
  gemm_amx<kPanelCols, kPanelCols>(
      y.rows, y.cols, x.cols,
      [&](int64_t i, int64_t m, int64_t k, int64_t d, bfloat16* packed) { pack_tiles(x, i, m, k, d, packed); },
      [&](int64_t k, int64_t d, int64_t j, int64_t n, Offset next, Pair* panel) {
        for (int64_t first = 0; first < n; first += kTile) {
          alignas(64) TileRows rebuilt;
          const Rows<bfloat16> made =
              tile_rows(rebuild, j + first, std::min(kTile, n - first), k, d, {next.cols, next.rows}, rebuilt);
          for (int64_t c = 0; c < d; c += kTileEntries) {
            transpose16(reinterpret_cast<const uint32_t*>(made.data + c), made.stride / 2,
                        reinterpret_cast<uint32_t*>(panel + c / 2 * kPanelCols + first), kPanelCols);
          }
        }
      },
      [&](int64_t i, int64_t m, int64_t j, int64_t n, const float* sums) {
        store_rows(y, i, m, j, n, sums, kPanelCols, bias);
      },
      parallel_for);
}

// grad_x = grad_y w: w already has the layout of the panels.
inline void linear_grad_input_amx(const Matrix<const bfloat16>& grad_y, const Subnetwork<bfloat16>& w,
                                  const Matrix<bfloat16>& grad_x, const ParallelFor& parallel_for) {
  const Rebuilder<bfloat16> rebuild(w);
  gemm_amx<kMostMade, kPanelCols>(
      grad_x.rows, grad_x.cols, grad_y.cols,
      [&](int64_t i, int64_t m, int64_t k, int64_t d, bfloat16* packed) { pack_tiles(grad_y, i, m, k, d, packed); },
      [&](int64_t k, int64_t d, int64_t j, int64_t n, Offset next, Pair* panels) {
        pack_right_of_rows<Pair>(
            d, n,
            [&](int64_t r, int64_t rows, bfloat16* out, int64_t stride) {
              const Offset following = r + rows < d ? Offset{rows, 0} : Offset{next.rows - r, next.cols};
              rebuild(k + r, rows, j, n, out, stride, following);
            },
            panels, kPanelUnits);
        end_panels(blocks_of(d, kUnitDepth<Pair>), n, panels, kPanelUnits);
      },
      [&](int64_t i, int64_t m, int64_t j, int64_t n, const float* sums) {
        store_rows<bfloat16>(grad_x, i, m, j, n, sums, kPanelCols, nullptr);
      },
      parallel_for);
}

// Up to this many rows of x, an entry of the output takes few multiplications, and gemm.h, which writes longer pieces
// of the output, stores them faster.
constexpr int64_t kFewRowsOfDepth = 64;

// grad_w = grad_y^T x, for one partition. Its rows are far apart in memory and are written in long pieces.
inline void linear_grad_weight_amx(const Matrix<const bfloat16>& grad_y, const Matrix<const bfloat16>& x,
                                   const MaskedStore<bfloat16>& store, const ParallelFor& parallel_for) {
  gemm_amx<kMostMade, kMostMade>(
      grad_y.cols, x.cols, x.rows,
      [&](int64_t i, int64_t m, int64_t k, int64_t d, bfloat16* packed) {
        pack_transposed_tiles(grad_y, k, d, i, m, packed);
      },
      [&](int64_t k, int64_t d, int64_t j, int64_t n, Offset, Pair* panels) {
        pack_right_depth(x, k, d, j, n, panels, kPanelUnits);
        end_panels(blocks_of(d, kUnitDepth<Pair>), n, panels, kPanelUnits);
      },
      [&](int64_t i, int64_t m, int64_t j, int64_t n, const float* sums) { store(i, m, j, n, sums, kMostMade); },
      parallel_for);
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
