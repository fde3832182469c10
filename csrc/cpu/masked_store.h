// The epilogue of a weight's gradient: stores the entries of one partition, and zeros elsewhere.
#pragma once

#include "gemm_in_output.h"
#include "mask.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

template <class T>
class MaskedStore {
 public:
  MaskedStore(const Owners& owners, int update, const Weight<T>& grad_w)
      : grad_w_(grad_w), is_contiguous_(rows_are_contiguous(grad_w)), decode_(owners, grad_w.cols(), update, update) {}

  // Stores product[row : row + rows, col : col + cols], rows `stride` apart; col is a multiple of kTileCols.
  void operator()(int64_t row, int64_t rows, int64_t col, int64_t cols, const Accumulator<T>* product,
                  int64_t stride) const {
    for_each_tile(row, rows, col, cols, [&](const Tile& tile) {
      const TileMask mask = decode_(tile);
      for (int64_t r = 0; r < tile.rows; ++r) {
        const Accumulator<T>* const from = product + (tile.row - row + r) * stride + tile.col - col;
        if (is_contiguous_) {
          copy_masked(mask.row[r], from, tile.cols, grad_w_.data + (tile.row + r) * grad_w_.row_stride + tile.col);
        } else {
          for_each_entry(grad_w_, tile.row + r, tile.col, tile.cols,
                         [&](int64_t c, T* entry) { *entry = mask.row[r] >> c & 1 ? narrow<T>(from[c]) : T{}; });
        }
      }
    });
  }

  // The marks of the same entries, for gemm_in_output.h.
  Marks marks(int64_t row, int64_t rows, int64_t col, int64_t cols) const {
    Marks found;
    for_each_tile(row, rows, col, cols, [&](const Tile& tile) {
      const TileMask mask = decode_(tile);
      for (int64_t r = 0; r < tile.rows; ++r) found.words[tile.row - row + r][(tile.col - col) / 64] = mask.row[r];
    });
    return found;
  }

 private:
  Weight<T> grad_w_;
  bool is_contiguous_;
  MaskDecoder decode_;
};

}  // namespace partkernels::cpu::PARTKERNELS_ISA
