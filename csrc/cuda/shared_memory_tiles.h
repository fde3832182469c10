// Tiles of matrices in shared memory, each copied by one warp.
#pragma once

#include "matmul_arguments.h"

namespace partkernels::cuda {

// A tile of 16-bit entries, with kCols a multiple of 64. The 16-byte parts of a row are permuted by the row's number,
// so that a column of parts of eight rows is spread over different banks.
template <int kRows, int kCols>
struct Tile {
  static constexpr int kPitch = kCols * 2, kBytes = kRows * kPitch, kParts = kCols / 8;

  static PARTKERNELS_DEVICE int offset(int row, int part) { return row * kPitch + 16 * (part ^ (row % 8)); }
};

// Starts to copy a tile from (row, col) on; entries outside of the matrix are 0. Rows are contiguous and begin at
// multiples of 16 bytes.
template <class T, int kRows, int kCols>
PARTKERNELS_DEVICE void copy_tile(SharedAddress tile, const Operand<T>& from, int row, int col) {
  using To = Tile<kRows, kCols>;
  const int lane = thread_index() % kWarp;
  // A thread copies the same part of every kStep-th row, so that one addition gives the next address.
  constexpr int kStep = kWarp / To::kParts;
  static_assert(kWarp % To::kParts == 0 && kRows % kStep == 0);
  const int first = lane / To::kParts, part = lane % To::kParts;
  const T* there = from.data + (row + first) * from.row_stride + col + 8 * part;
  const int64_t step = kStep * from.row_stride;
  const int rows = from.rows - (row + first), bytes = 2 * max_of(0, min_of(8, from.cols - (col + 8 * part)));
  PARTKERNELS_UNROLL
  for (int r = 0; r < kRows; r += kStep, there += step) {
    copy_async(tile + To::offset(first + r, part), there, r < rows ? bytes : 0);
  }
}

// The bytes of a tile's rows in the map, in whole parts of 16.
PARTKERNELS_FUNCTION int map_bytes(int cols, int bits) { return cols * bits / 8 < 16 ? 16 : cols * bits / 8; }

// Starts to copy the tile's part of the map, [kRows][map_bytes]. Bytes outside of the map are 0.
template <class T, int kRows, int kCols>
PARTKERNELS_DEVICE void copy_map(SharedAddress to, const Rebuilt<T>& w, int row, int col) {
  const int lane = thread_index() % kWarp;
  const int bytes = map_bytes(kCols, w.bits), parts = bytes / 16;
  // The logarithm of 1, 2, 4 or 8: a shift costs less than a division.
  const int log2_parts = (parts > 1) + (parts > 2) + (parts > 4);
  const int part = lane & (parts - 1), first = lane >> log2_parts, step = kWarp >> log2_parts;
  const int64_t byte = int64_t{col} * w.bits / 8 / 16 * 16 + 16 * part;
  const int rows = byte < w.row_bytes ? w.weight.rows - row : 0;
  const uint8_t* there = w.map + (row + first) * w.row_bytes + byte;
  for (int r = first; r < kRows; r += step, there += step * w.row_bytes) {
    copy_async(to + r * bytes + 16 * part, there, r < rows ? 16 : 0);
  }
}

}  // namespace partkernels::cuda
