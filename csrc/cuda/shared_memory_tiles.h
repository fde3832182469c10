// Tiles of matrices in shared memory, and the tile of a subnetwork's weight that is rebuilt there.
#pragma once

#include "matmul_arguments.h"

namespace partkernels::cuda {

// A tile of 16-bit entries, kCols a multiple of 64. The 16-byte parts of a row change places by the row's number, so
// that eight rows of a column of parts lie in different banks.
template <int kRows, int kCols>
struct Tile {
  static constexpr int kPitch = kCols * 2, kBytes = kRows * kPitch, kParts = kCols / 8;

  static PARTKERNELS_DEVICE int offset(int row, int part) { return row * kPitch + 16 * (part ^ (row % 8)); }
};

// The threads that share a task.
template <int kCount>
struct Crew {
  int index;
};
PARTKERNELS_DEVICE Crew<kWarp> whole_warp() { return {thread_index() % kWarp}; }

// Starts to copy a tile from (row, col) on; what is outside of the matrix is 0. Rows are of neighbouring entries, and
// begin at multiples of 16 bytes.
template <class T, int kRows, int kCols, int kCount>
PARTKERNELS_DEVICE void copy_tile(SharedAddress tile, const Operand<T>& from, int row, int col, Crew<kCount> crew) {
  using To = Tile<kRows, kCols>;
  // A thread has the same part of every kStep-th row: an addition leads from one to the next.
  constexpr int kStep = kCount / To::kParts;
  static_assert(kCount % To::kParts == 0 && kRows % kStep == 0);
  const int first = crew.index / To::kParts, part = crew.index % To::kParts;
  const T* there = from.data + (row + first) * from.row_stride + col + 8 * part;
  const int64_t step = kStep * from.row_stride;
  const int rows = from.rows - (row + first), bytes = 2 * max_of(0, min_of(8, from.cols - (col + 8 * part)));
  PARTKERNELS_UNROLL
  for (int r = 0; r < kRows; r += kStep, there += step) {
    copy_async(tile + To::offset(first + r, part), there, r < rows ? bytes : 0);
  }
}

// The same for any strides, at once.
template <class T, int kRows, int kCols, int kCount>
PARTKERNELS_DEVICE void gather_tile(char* tile, const Operand<T>& from, int row, int col, Crew<kCount> crew) {
  using To = Tile<kRows, kCols>;
  for (int i = crew.index; i < kRows * kCols; i += kCount) {
    const int r = i / kCols, c = i % kCols;
    const bool is_there = row + r < from.rows && col + c < from.cols;
    *reinterpret_cast<T*>(tile + To::offset(r, c / 8) + 2 * (c % 8)) =
        is_there ? from.data[(row + r) * from.row_stride + (col + c) * from.col_stride] : T{};
  }
}

// The bytes of a tile's rows in the map, whole parts of 16.
PARTKERNELS_FUNCTION int map_bytes(int cols, int bits) { return cols * bits / 8 < 16 ? 16 : cols * bits / 8; }

// Starts to copy the part of the map that a tile needs, [kRows][map_bytes]. What is outside of the map is 0.
template <class T, int kRows, int kCols, int kCount>
PARTKERNELS_DEVICE void copy_map(SharedAddress to, const Rebuilt<T>& w, int row, int col, Crew<kCount> crew) {
  const int bytes = map_bytes(kCols, w.bits), parts = bytes / 16;
  // Of 1, 2, 4 or 8: a shift costs less than a division.
  const int log2_parts = (parts > 1) + (parts > 2) + (parts > 4);
  const int part = crew.index & (parts - 1), first = crew.index >> log2_parts, step = kCount >> log2_parts;
  const int64_t byte = int64_t{col} * w.bits / 8 / 16 * 16 + 16 * part;
  const int rows = byte < w.row_bytes ? w.weight.rows - row : 0;
  const uint8_t* there = w.map + (row + first) * w.row_bytes + byte;
  for (int r = first; r < kRows; r += step, there += step * w.row_bytes) {
    copy_async(to + r * bytes + 16 * part, there, r < rows ? 16 : 0);
  }
}

// Puts defaults where the entries of a tile from (row, col) on are dead. `stored` is the same tile of the stored
// defaults; `map` is the map of the tile, `pitch` bytes a row. kStoresMatrices: the GPU has store_matrices.
template <class T, DefaultKind kKind, int kRows, int kCols, bool kStoresMatrices, int kCount>
PARTKERNELS_DEVICE void rebuild_tile(char* tile, const char* stored, const uint8_t* map, int pitch, const Rebuilt<T>& w,
                                     int row, int col, Crew<kCount> crew) {
  using In = Tile<kRows, kCols>;
  constexpr int kRowsAtOnce = kCount / kQuad;
  static_assert(kCount % kWarp == 0 && kRows % 8 == 0 && kRows * (kCols / kGroup) % kRowsAtOnce == 0);
  const int lane = crew.index % kWarp, q = lane % kQuad;
  PARTKERNELS_UNROLL
  for (int i = 0; i < kRows * (kCols / kGroup); i += kRowsAtOnce) {
    // A warp has eight rows of 64 columns: eight matrices, whose words a thread gets as a fragment has them.
    const int eight = i + crew.index / kWarp * 8, first = eight % kRows, group = eight / kRows,
              r = first + lane / kQuad;
    const auto at = [&](int half) { return In::offset(first + lane % 8, 8 * group + 4 * half + lane / 8); };
    uint32_t words[2][4], dead[kPairs], mask[kPairs];
    PARTKERNELS_UNROLL
    for (int half = 0; half < 2; ++half) load_matrices(shared_address(tile) + at(half), words[half]);
    if constexpr (kKind == DefaultKind::stored) {
      PARTKERNELS_UNROLL
      for (int half = 0; half < 2; ++half) {
        uint32_t four[4];
        load_matrices(shared_address(stored) + at(half), four);
        PARTKERNELS_UNROLL
        for (int j = 0; j < 4; ++j) dead[4 * half + j] = four[j];
      }
    } else {
      default_pairs<T, kKind>(w.defaults, row + r, col / kGroup + group, q, dead);
    }
    dead_pairs(map + r * pitch + group * 8 * w.bits, w.bits, q, w.threshold, mask);
    PARTKERNELS_UNROLL
    for (int j = 0; j < kPairs; ++j) words[j / 4][j % 4] = select_bits(mask[j], dead[j], words[j / 4][j % 4]);
    if constexpr (kStoresMatrices) {
      PARTKERNELS_UNROLL
      for (int half = 0; half < 2; ++half) store_matrices(shared_address(tile) + at(half), words[half]);
    } else {
      // A thread writes over what others of its warp have read. Matrices are stored by all of them at once.
      synchronize_warp();
      PARTKERNELS_UNROLL
      for (int j = 0; j < kPairs; ++j) {
        *reinterpret_cast<uint32_t*>(tile + In::offset(r, 8 * group + j) + 4 * q) = words[j / 4][j % 4];
      }
    }
  }
}

}  // namespace partkernels::cuda
