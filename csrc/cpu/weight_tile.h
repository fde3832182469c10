// The tile in which a weight is decoded and rebuilt: 4 rows by 64 columns.
//
// 64 columns of uniform defaults take 4 Philox calls per row, so 16 lanes fill a tile. A row of a tile has 64 bits of a
// mask, and its first column is a multiple of 64.
#pragma once

#include "isa.h"
#include "partkernels/cpu.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

constexpr int64_t kTileRows = 4;
constexpr int64_t kTileCols = 64;

inline int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }

// The existing rows and columns of a tile, or of a block. The rows are consecutive or, if there are ids, the rows
// ids[row], ids[row + 1], ...
struct Tile {
  int64_t row, rows, col, cols;
  const int64_t* ids = nullptr;

  // The weight's row for row r of the tile; for r beyond the last row, the last row.
  int64_t row_at(int64_t r) const {
    const int64_t at = row + std::min(r, rows - 1);
    return ids == nullptr ? at : ids[at];
  }
};

// Rows of a block, anywhere in memory.
template <class T>
struct Rows {
  const T* data;
  int64_t stride;
};

// Calls use(tile) for the tiles of a block, row by row, so that row-major memory is read in order. col is a multiple of
// kTileCols.
template <class Use>
void for_each_tile(int64_t row, int64_t rows, int64_t col, int64_t cols, const Use& use) {
  for (int64_t r = 0; r < rows; r += kTileRows) {
    for (int64_t c = 0; c < cols; c += kTileCols) {
      use(Tile{row + r, std::min(kTileRows, rows - r), col + c, std::min(kTileCols, cols - c)});
    }
  }
}

// Calls use(j, n, pointer) for the runs of entries (row, col + j), (row, col + j + 1), ... that are in_stride apart.
template <class T, class Use>
void for_each_run(const Weight<T>& weight, int64_t row, int64_t col, int64_t n, const Use& use) {
  T* const base = weight.data + row * weight.row_stride;
  for (int64_t j = 0; j < n;) {
    const int64_t pixel = (col + j) / weight.in;
    const int64_t in = (col + j) % weight.in;
    const int64_t length = std::min(n - j, weight.in - in);
    use(j, length,
        base + pixel / weight.width * weight.y_stride + pixel % weight.width * weight.x_stride + in * weight.in_stride);
    j += length;
  }
}

// Calls use(j, pointer) for j in [0, n) with the address of the entry (row, col + j) of a weight.
template <class T, class Use>
void for_each_entry(const Weight<T>& weight, int64_t row, int64_t col, int64_t n, const Use& use) {
  for_each_run(weight, row, col, n, [&](int64_t j, int64_t length, T* entry) {
    for (const int64_t end = j + length; j < end; ++j, entry += weight.in_stride) use(j, entry);
  });
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
