// Rows of a subnetwork's weight for a product of tiles: kTile outputs at a time, of whole tiles in depth.
#pragma once

#include "multiply_by_tiles.h"
#include "rebuild.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

// Rows a power of two apart would share sets of the cache.
constexpr int64_t kStripStride = kStrip + kTileEntries;

using TileRows = bfloat16[kTile][kStripStride];

// w_k[out : out + rows, k : k + depth], where they are in the weight or put into `rebuilt`. Behind the depth are zeros,
// up to whole tiles: what is in memory may be NaN, and that times zero is NaN. What is behind the rows is anything.
inline Rows<bfloat16> tile_rows(const Rebuilder<bfloat16>& rebuild, int64_t out, int64_t rows, int64_t k, int64_t depth,
                                Offset next, TileRows& rebuilt) {
  // Of the weight itself only whole tiles can be read.
  if (rows == kTile && depth % kTileEntries == 0) {
    return rebuild.rows_of(out, rows, k, depth, rebuilt[0], kStripStride, next);
  }
  rebuild(out, rows, k, depth, rebuilt[0], kStripStride, next);
  const int64_t whole = blocks_of(depth, kTileEntries) * kTileEntries;
  for (int64_t r = 0; r < rows; ++r) std::fill(rebuilt[r] + depth, rebuilt[r] + whole, bfloat16{0});
  return {rebuilt[0], kStripStride};
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
