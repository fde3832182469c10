// The materialised weight of a subnetwork, and what its gradient keeps.
#pragma once

#include "rebuild.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

// Calls body(begin, end) for ranges of strips of kTileRows rows; small weights are not worth a second thread.
template <class Body>
void for_strips(int64_t rows, int64_t cols, const ParallelFor& parallel_for, const Body& body) {
  constexpr int64_t kSmall = 1 << 15;
  const int64_t strips = blocks_of(rows, kTileRows);
  if (rows * cols <= kSmall) {
    body(int64_t{0}, strips);
  } else {
    parallel_for(strips, body);
  }
}

// Calls use(tile) for the tiles of a weight, a strip of kTileRows rows at a time.
template <class Use>
void for_each_tile(int64_t rows, int64_t cols, const ParallelFor& parallel_for, const Use& use) {
  for_strips(rows, cols, parallel_for, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kTileRows;
    for_each_tile(first, std::min(rows, end * kTileRows) - first, 0, cols, use);
  });
}

template <class T>
void subnetwork_weight(const Subnetwork<T>& w, int64_t first_row, int64_t first_in, Weight<T> out,
                       const ParallelFor& parallel_for) {
  const Rebuilder<T> rebuild(w);
  const bool is_contiguous = rows_are_contiguous(out);
  if (out.in < w.weight.in) {  // of each tap, the columns of some input channels
    for_strips(out.rows, out.cols(), parallel_for, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin * kTileRows; row < std::min(out.rows, end * kTileRows); row += kTileRows) {
        const int64_t rows = std::min(kTileRows, out.rows - row);
        std::vector<T> values(rows * out.in);
        for (int64_t tap = 0; tap < out.height * out.width; ++tap) {
          rebuild.anywhere(first_row + row, rows, tap * w.weight.in + first_in, out.in, values.data(), out.in);
          for (int64_t r = 0; r < rows; ++r) {
            for_each_entry(out, row + r, tap * out.in, out.in,
                           [&](int64_t j, T* entry) { *entry = values[r * out.in + j]; });
          }
        }
      }
    });
    return;
  }
  if (!is_contiguous && rebuild.overwrites() && taps_are_contiguous(w.weight) && taps_are_contiguous(out)) {
    // A contiguous convolution's: it is copied as it lies, which takes half as long as taking its entries in the
    // map's order.
    for_strips(out.rows, out.cols(), parallel_for, [&](int64_t begin, int64_t end) {
      const int64_t row = begin * kTileRows, rows = std::min(out.rows, end * kTileRows) - row;
      for (int64_t r = row; r < row + rows; ++r) {
        const T* const from = w.weight.data + (first_row + r) * w.weight.row_stride;
        std::copy_n(from, out.cols(), out.data + r * out.row_stride);
      }
      rebuild.overwrite_dead(first_row + row, rows, out, row);
    });
    return;
  }
  for_each_tile(out.rows, out.cols(), parallel_for, [&](const Tile& tile) {
    const int64_t row = first_row + tile.row;
    if (is_contiguous) {
      rebuild(row, tile.rows, tile.col, tile.cols, out.data + tile.row * out.row_stride + tile.col, out.row_stride);
      return;
    }
    T values[kTileRows][kTileCols];
    rebuild(row, tile.rows, tile.col, tile.cols, values[0], kTileCols);
    for (int64_t r = 0; r < tile.rows; ++r) {
      for_each_entry(out, tile.row + r, tile.col, tile.cols, [&](int64_t j, T* entry) { *entry = values[r][j]; });
    }
  });
}

template <class T>
void subnetwork_weight_grad(Weight<const T> grad, Owners owners, int first, int last, Weight<T> out,
                            const ParallelFor& parallel_for) {
  const MaskDecoder decode(owners, out.cols(), first, last);
  const bool in_place = grad.data == out.data;
  for_each_tile(out.rows, out.cols(), parallel_for, [&](const Tile& tile) {
    const TileMask mask = decode(tile);
    if (in_place) {
      for_each_entry_of([&](int64_t r) { return ~mask.row[r]; }, out, tile,
                        [](int64_t, int64_t, T* entry) { *entry = T{}; });
      return;
    }
    for (int64_t r = 0; r < tile.rows; ++r) {
      T values[kTileCols];
      for_each_entry(grad, tile.row + r, tile.col, tile.cols,
                     [&](int64_t j, const T* entry) { values[j] = mask.row[r] >> j & 1 ? *entry : T{}; });
      for_each_entry(out, tile.row + r, tile.col, tile.cols, [&](int64_t j, T* entry) { *entry = values[j]; });
    }
  });
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
