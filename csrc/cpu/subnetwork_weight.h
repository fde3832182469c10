// The materialised weight of a subnetwork, and its masked gradient.
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

// Writes a contiguous convolution weight, or a gradient in its layout, in the order of memory. This takes a fifth to a
// tenth of the time of writing entry by entry in the map's order. mark(row, rows, marked) makes some rows of marks in
// the map's order, and use(row, marked, to) writes a row from its marks in the order of memory.
template <class T, class Mark, class Use>
void for_marked_rows(const Weight<T>& out, const ParallelFor& parallel_for, const Mark& mark, const Use& use) {
  const int64_t cols = out.cols();
  for_strips(out.rows, cols, parallel_for, [&](int64_t begin, int64_t end) {
    std::vector<bfloat16> columns(kTileRows * cols), marked(cols);
    for (int64_t row = begin * kTileRows; row < std::min(out.rows, end * kTileRows); ++row) {
      const int64_t r = row % kTileRows;
      if (r == 0) mark(row, std::min(kTileRows, out.rows - row), columns.data());
      interleave(columns.data() + r * cols, out.in, out.height * out.width, marked.data());
      use(row, marked.data(), out.data + row * out.row_stride);
    }
  });
}

template <class T>
void subnetwork_weight(const Subnetwork<T>& w, int64_t first_row, int64_t first_in, Weight<T> out,
                       const ParallelFor& parallel_for) {
  const Rebuilder<T> rebuild(w);
  const bool is_contiguous = rows_are_contiguous(out);
  if (out.in < w.weight.in) {  // for each tap, the columns of some input channels
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
  const bool is_stored = w.defaults.kind == DefaultKind::stored;
  if (!is_contiguous && w.active < w.count && taps_are_contiguous(w.weight) && taps_are_contiguous(out) &&
      (!is_stored || taps_are_contiguous(w.stored))) {
    const auto mark = [&](int64_t row, int64_t rows, bfloat16* marked) {
      rebuild.mark(first_row + row, rows, marked, out.cols());
    };
    return for_marked_rows(out, parallel_for, mark, [&](int64_t row, const bfloat16* marked, T* to) {
      const T* const weight = w.weight.data + (first_row + row) * w.weight.row_stride;
      if (is_stored) {
        const T* const stored = w.stored.data + (first_row + row) * w.stored.row_stride;
        select_marked(marked, weight, out.cols(), to, [=](int64_t j, bfloat16) { return stored[j]; });
      } else {
        select_marked(marked, weight, out.cols(), to, [](int64_t, bfloat16 dead) { return narrow<T>(widen(dead)); });
      }
    });
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
  const int64_t cols = out.cols();
  const bool by_rows = rows_are_contiguous(grad) && rows_are_contiguous(out);
  if (!by_rows && taps_are_contiguous(grad) && taps_are_contiguous(out)) {
    const auto mark = [&](int64_t row, int64_t rows, bfloat16* marked) {
      for_each_tile(row, rows, 0, cols, [&](const Tile& tile) {
        const TileMask mask = decode(tile);
        for (int64_t r = 0; r < tile.rows; ++r) {
          mark_live(mask.row[r], kZeros, tile.cols, marked + (tile.row - row + r) * cols + tile.col);
        }
      });
    };
    return for_marked_rows(out, parallel_for, mark, [&](int64_t row, const bfloat16* marked, T* to) {
      select_marked(marked, grad.data + row * grad.row_stride, cols, to, [](int64_t, bfloat16) { return T{}; });
    });
  }
  for_each_tile(out.rows, cols, parallel_for, [&](const Tile& tile) {
    const TileMask mask = decode(tile);
    for (int64_t r = 0; r < tile.rows; ++r) {
      if (by_rows) {
        const T* const from = grad.data + (tile.row + r) * grad.row_stride + tile.col;
        select(mask.row[r], from, kZeros, tile.cols, out.data + (tile.row + r) * out.row_stride + tile.col);
        continue;
      }
      T values[kTileCols];
      for_each_entry(grad, tile.row + r, tile.col, tile.cols,
                     [&](int64_t j, const T* entry) { values[j] = mask.row[r] >> j & 1 ? *entry : T{}; });
      for_each_entry(out, tile.row + r, tile.col, tile.cols, [&](int64_t j, T* entry) { *entry = values[j]; });
    }
  });
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
