// linear for a small batch, in bfloat16 with AMX: rows of the weight are rebuilt and multiplied in place, 16 at a time,
// so that the weight is never packed and a product of tiles costs little beside rebuilding it. The tiles of sums are
// the output's transpose.
#pragma once

#include "pack.h"
#include "store_rows.h"
#include "tile_rows.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

// The maximum number of rows of x: with more, packing x in tiles takes longer than packing the weight.
constexpr int64_t kFewRowsOfTiles = 2 * kTile;

// A tile of x has kTile pairs by kTile rows.
constexpr int64_t kTileUnits = kTile * kTile;

// One step of depth: tile Columns * chain + c of the sums += a tile of the weight times tile c of x.
template <int Columns, int chain>
void add_step(const bfloat16* w, int64_t w_stride, const Pair* x) {
  constexpr int kWeight = 4 + chain % 2;
  amx::load<kWeight>(w, w_stride * sizeof(bfloat16));
  const auto add_column = [&]<int c>(std::integral_constant<int, c>) __attribute__((always_inline)) {
    constexpr int kX = 6 + (chain + c) % 2;
    amx::load_once<kX>(x + c * kTileUnits, kTile * sizeof(Pair));
    amx::add_product<Columns * chain + c, kWeight, kX>();
  };
  add_column(std::integral_constant<int, 0>{});
  if constexpr (Columns > 1) add_column(std::integral_constant<int, 1>{});
}

// `steps` steps, in chains of sums that do not wait for each other.
template <int Columns>
void add_steps(const bfloat16* w, int64_t w_stride, const Pair* x, int64_t steps) {
  const auto add = [&]<int chain>(std::integral_constant<int, chain>, int64_t step) __attribute__((always_inline)) {
    if (step < steps) add_step<Columns, chain>(w + step * kTileEntries, w_stride, x + step * Columns * kTileUnits);
  };
  constexpr int kChains = 4 / Columns;
  for (int64_t step = 0; step < steps; step += kChains) {
    add(std::integral_constant<int, 0>{}, step);
    add(std::integral_constant<int, 1>{}, step + 1);
    if constexpr (kChains == 4) {
      add(std::integral_constant<int, 2>{}, step + 2);
      add(std::integral_constant<int, 3>{}, step + 3);
    }
  }
}

// y = x w^T + bias for at most kTile * Columns rows of x; the depth is not 0.
template <int Columns>
void linear_of_tiles(const Matrix<const bfloat16>& x, const Subnetwork<bfloat16>& w, const bfloat16* bias,
                     const Matrix<bfloat16>& y, const ParallelFor& parallel_for) {
  constexpr int64_t kBlock = 64;  // outputs of a task
  // The depth for which x is packed at once.
  constexpr int64_t kPacked = kBatch<Pair> * kCols / (Columns * kTileUnits) * kTileEntries / kStrip * kStrip;
  static_assert(sizeof(TileRows) <= sizeof(Workspace<Pair>::right));
  static_assert(kFewRowsOfTiles * kCols * sizeof(float) <= sizeof(Workspace<Pair>::left));
  const Rebuilder<bfloat16> rebuild(w);
  const int64_t depth = x.cols;

  // packed[step][column]: a tile of pairs for each kTileEntries entries of the depth and kTile rows of x, zeros beyond
  // them.
  const auto pack = [&](int64_t start, int64_t stop, Pair* packed) {
    for (int64_t k = start; k < stop; k += kTileEntries) {
      const int64_t d = std::min(kTileEntries, stop - k);
      for (int64_t first = 0; first < Columns * kTile; first += kTile, packed += kTileUnits) {
        alignas(64) bfloat16 rows[kTile][kTileEntries] = {};
        for (int64_t r = 0; r < std::min(kTile, x.rows - first); ++r) {
          copy(x.data + (first + r) * x.row_stride + k * x.col_stride, x.col_stride, d, rows[r]);
        }
        transpose16(reinterpret_cast<const uint32_t*>(rows), kTile, reinterpret_cast<uint32_t*>(packed), kTile);
      }
    }
  };

  // product[m][r] (+)= the products of the depth [start, stop), for which x is packed, for kTile outputs from `out` on.
  const auto multiply_rows_of_weight = [&](int64_t out, int64_t rows, int64_t start, int64_t stop, const Pair* packed,
                                           TileRows& rebuilt, float* product) {
    amx::zero<0>();
    amx::zero<1>();
    amx::zero<2>();
    amx::zero<3>();
    for (int64_t k = start; k < stop; k += kStrip) {
      const int64_t d = std::min(kStrip, stop - k), steps = blocks_of(d, kTileEntries);
      const Offset next = k + kStrip < stop ? Offset{0, kStrip} : Offset{kTile, start - k};
      const Rows<bfloat16> made = tile_rows(rebuild, out, rows, k, d, next, rebuilt);
      add_steps<Columns>(made.data, made.stride, packed + (k - start) / kTileEntries * Columns * kTileUnits, steps);
    }
    alignas(64) float sums[4][kTile * kTile];
    amx::store<0>(sums[0], kTile * sizeof(float));
    amx::store<1>(sums[1], kTile * sizeof(float));
    amx::store<2>(sums[2], kTile * sizeof(float));
    amx::store<3>(sums[3], kTile * sizeof(float));
    for (int c = 0; c < Columns; ++c) {
      for (int other = c + Columns; other < 4; other += Columns) {
        for (int64_t i = 0; i < kTile * kTile; ++i) sums[c][i] += sums[other][i];
      }
      alignas(64) float turned[kTile * kTile];
      transpose16(reinterpret_cast<const uint32_t*>(sums[c]), kTile, reinterpret_cast<uint32_t*>(turned), kTile);
      for (int64_t m = 0; m < kTile; ++m) {
        float* const to = product + (c * kTile + m) * kCols;
        for (int64_t r = 0; r < kTile; ++r) to[r] = start > 0 ? to[r] + turned[m * kTile + r] : turned[m * kTile + r];
      }
    }
  };

  parallel_for(blocks_of(w.weight.rows, kBlock), [&](int64_t begin, int64_t end) {
    Workspace<Pair>& space = workspace<Pair>();
    Pair* const packed = reinterpret_cast<Pair*>(space.product);
    float* const product = reinterpret_cast<float*>(space.left);
    TileRows& rebuilt = reinterpret_cast<TileRows&>(space.right);
    const Tiles tiles;
    int64_t packed_from = -1;
    for (int64_t first = begin * kBlock; first < std::min(w.weight.rows, end * kBlock); first += kBlock) {
      const int64_t last = std::min(w.weight.rows, first + kBlock);
      for (int64_t start = 0; start < depth; start += kPacked) {
        const int64_t stop = std::min(depth, start + kPacked);
        if (packed_from != start) pack(start, stop, packed);
        packed_from = start;
        for (int64_t out = first; out < last; out += kTile) {
          multiply_rows_of_weight(out, std::min(kTile, last - out), start, stop, packed, rebuilt,
                                  product + (out - first));
        }
      }
      store_rows(y, 0, x.rows, first, last - first, product, kCols, bias);
    }
  });
}

inline void linear_of_few_rows_amx(const Matrix<const bfloat16>& x, const Subnetwork<bfloat16>& w, const bfloat16* bias,
                                   const Matrix<bfloat16>& y, const ParallelFor& parallel_for) {
  (x.rows <= kTile ? linear_of_tiles<1> : linear_of_tiles<2>)(x, w, bias, y, parallel_for);
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
