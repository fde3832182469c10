// Rows of a subnetwork's weight for a product of tiles: kTile outputs at a time, with whole tiles in depth.
#pragma once

#include "multiply_amx.h"
#include "rebuild.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

// Rows a power of two apart would share sets of the cache.
constexpr int64_t kStripStride = kStrip + kTileEntries;

using TileRows = bfloat16[kTile][kStripStride];

// w_k[out : out + rows, k : k + depth], in the weight itself or copied to `rebuilt`. Zeros are appended to the depth,
// up to whole tiles, since memory may contain NaN, and NaN times zero is NaN. Entries beyond the rows are undefined.
inline Rows<bfloat16> tile_rows(const Rebuilder<bfloat16>& rebuild, int64_t out, int64_t rows, int64_t k, int64_t depth,
                                Offset next, TileRows& rebuilt) {
  // Only whole tiles can be read from the weight itself.
  if (rows == kTile && depth % kTileEntries == 0) {
    return rebuild.rows_of(out, rows, k, depth, rebuilt[0], kStripStride, next);
  }
  rebuild(out, rows, k, depth, rebuilt[0], kStripStride, next);
  const int64_t whole = blocks_of(depth, kTileEntries) * kTileEntries;
  for (int64_t r = 0; r < rows; ++r) std::fill(rebuilt[r] + depth, rebuilt[r] + whole, bfloat16{0});
  return {rebuilt[0], kStripStride};
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
