// Tiles of matrices in shared memory, and the tile of a subnetwork's weight that is rebuilt there.
#pragma once

#include "product.h"

namespace partkernels::cuda {

// A tile of 16-bit entries, kCols a multiple of 64. The 16-byte parts of a row change places by the row's number, so
// that eight rows of a column of parts lie in different banks.
template <int kRows, int kCols>
struct Tile {
  static constexpr int kPitch = kCols * 2, kBytes = kRows * kPitch, kParts = kCols / 8;

  static PARTKERNELS_DEVICE int offset(int row, int part) { return row * kPitch + 16 * (part ^ (row % 8)); }
};

// The threads that share a task.
struct Crew {
  int index, count;
};
PARTKERNELS_DEVICE Crew whole_block() { return {thread_index(), threads()}; }
PARTKERNELS_DEVICE Crew whole_warp() { return {thread_index() % kWarp, kWarp}; }

// Starts to copy a tile from (row, col) on; what is outside of the matrix is 0. Rows are of neighbouring entries, and
// begin at multiples of 16 bytes.
template <class T, int kRows, int kCols>
PARTKERNELS_DEVICE void copy_tile(SharedAddress tile, const Operand<T>& from, int row, int col, Crew crew) {
  using To = Tile<kRows, kCols>;
  for (int i = crew.index; i < kRows * To::kParts; i += crew.count) {
    const int r = i / To::kParts, part = i % To::kParts;
    const int rest = row + r < from.rows ? from.cols - (col + 8 * part) : 0;
    const int entries = rest < 0 ? 0 : min_of(rest, 8);
    const T* const there = entries > 0 ? from.data + (row + r) * from.row_stride + col + 8 * part : from.data;
    copy_async(tile + To::offset(r, part), there, 2 * entries);
  }
}

// The same for any strides, at once.
template <class T, int kRows, int kCols>
PARTKERNELS_DEVICE void gather_tile(char* tile, const Operand<T>& from, int row, int col) {
  using To = Tile<kRows, kCols>;
  for (int i = thread_index(); i < kRows * kCols; i += threads()) {
    const int r = i / kCols, c = i % kCols;
    const bool is_there = row + r < from.rows && col + c < from.cols;
    *reinterpret_cast<T*>(tile + To::offset(r, c / 8) + 2 * (c % 8)) =
        is_there ? from.data[(row + r) * from.row_stride + (col + c) * from.col_stride] : T{};
  }
}

// The bytes of a tile's rows in the map, whole parts of 16.
PARTKERNELS_FUNCTION int map_bytes(int cols, int bits) { return cols * bits / 8 < 16 ? 16 : cols * bits / 8; }

// Starts to copy the part of the map that a tile needs, [kRows][map_bytes]. What is outside of the map is 0.
template <class T, int kRows, int kCols>
PARTKERNELS_DEVICE void copy_map(SharedAddress to, const Rebuilt<T>& w, int row, int col, Crew crew) {
  const int bytes = map_bytes(kCols, w.bits), parts = bytes / 16;
  const int64_t first = int64_t{col} * w.bits / 8 / 16 * 16;
  for (int i = crew.index; i < kRows * parts; i += crew.count) {
    const int r = i / parts, part = i % parts;
    const bool is_there = row + r < w.weight.rows && first + 16 * part < w.row_bytes;
    copy_async(to + r * bytes + 16 * part, w.map + (is_there ? (row + r) * w.row_bytes + first + 16 * part : 0),
               is_there ? 16 : 0);
  }
}

// Puts defaults where the entries of a tile from (row, col) on are dead. `stored` is the same tile of the stored
// defaults; `map` is the map of the tile, `pitch` bytes a row.
template <class T, DefaultKind kKind, int kRows, int kCols>
PARTKERNELS_DEVICE void rebuild_tile(char* tile, const char* stored, const uint8_t* map, int pitch, const Rebuilt<T>& w,
                                     int row, int col, Crew crew) {
  using In = Tile<kRows, kCols>;
  constexpr int kGroups = kCols / kGroup;
  static_assert(kRows * kGroups * kQuad % kWarp == 0);
  for (int i = crew.index; i < kRows * kGroups * kQuad; i += crew.count) {
    const int q = i % kQuad, r = i / kQuad % kRows, group = i / kQuad / kRows;
    uint32_t mask[kPairs], dead[kPairs];
    dead_pairs(map + r * pitch + group * 8 * w.bits, w.bits, q, w.threshold, mask);
    if constexpr (kKind != DefaultKind::stored) {
      default_pairs<T, kKind>(w.defaults, row + r, col / kGroup + group, q, dead);
    }
    PARTKERNELS_UNROLL
    for (int j = 0; j < kPairs; ++j) {
      const int at = In::offset(r, 8 * group + j) + 4 * q;
      auto* const entries = reinterpret_cast<uint32_t*>(tile + at);
      if constexpr (kKind == DefaultKind::stored) dead[j] = *reinterpret_cast<const uint32_t*>(stored + at);
      *entries = select_bits(mask[j], dead[j], *entries);
    }
  }
}

}  // namespace partkernels::cuda
