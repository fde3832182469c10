// Rebuilding blocks of a subnetwork's weight: the seam between the packed map and a multiplication.
#pragma once

#include "accumulate.h"
#include "draw.h"
#include "keep.h"
#include "tile.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

#if defined(PARTKERNELS_AVX512)
inline __m512 widen16(const bfloat16* from) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// A row of a whole tile.
inline void select_row(uint64_t live, const float* weight, const bfloat16* dead, float* out) {
  for (int j = 0; j < kTileCols; j += 16) {
    const auto mask = static_cast<__mmask16>(live >> j);
    _mm512_storeu_ps(out + j, _mm512_mask_loadu_ps(widen16(dead + j), mask, weight + j));
  }
}

inline void select_row(uint64_t live, const bfloat16* weight, const bfloat16* dead, bfloat16* out) {
  for (int j = 0; j < kTileCols; j += 32) {
    const auto mask = static_cast<__mmask32>(live >> j);
    _mm512_storeu_si512(out + j, _mm512_mask_loadu_epi16(_mm512_loadu_si512(dead + j), mask, weight + j));
  }
}
#endif

// out[j] = live bit j ? weight[j] : dead[j] for j in [0, n), n at most 64.
template <class T, class Dead>
void select(uint64_t live, const T* weight, const Dead* dead, int64_t n, T* out) {
#if defined(PARTKERNELS_AVX512)
  if constexpr (!std::is_same_v<T, double> && std::is_same_v<Dead, bfloat16>) {
    if (n == kTileCols) return select_row(live, weight, dead, out);
  }
#endif
  for (int64_t j = 0; j < n; ++j) {
    if constexpr (std::is_same_v<T, Dead>) {
      out[j] = live >> j & 1 ? weight[j] : dead[j];
    } else {
      out[j] = live >> j & 1 ? weight[j] : static_cast<T>(widen(dead[j]));
    }
  }
}

// The same where all are live.
template <class T>
void copy_row(const T* weight, int64_t n, T* out) {
  if (n == kTileCols) {
    std::memcpy(out, weight, kTileCols * sizeof(T));
  } else {
    std::copy_n(weight, n, out);
  }
}

struct Offset {
  int64_t rows, cols;
};

// Makes blocks of the weight of one subnetwork.
template <class T>
class Rebuilder {
 public:
  explicit Rebuilder(const Subnetwork<T>& w)
      : w_(w),
        is_contiguous_(rows_are_contiguous(w.weight)),
        stored_is_contiguous_(w.defaults.kind == DefaultKind::stored && rows_are_contiguous(w.stored)),
        draws_(w.active < w.count &&
               (w.defaults.kind == DefaultKind::uniform || w.defaults.kind == DefaultKind::normal)),
        live_(w.owners, w.weight.cols(), 1, w.active),
        draw_(w.defaults) {}

  // out[r * stride + c] = w_k[row + r][col + c]; col is a multiple of kTileCols. The block that lies `next` rows and
  // columns further on is fetched meanwhile.
  void operator()(int64_t row, int64_t rows, int64_t col, int64_t cols, T* out, int64_t stride,
                  Offset next = {0, 0}) const {
    for (int64_t start = 0; start < cols; start += kStrip) {
      strip(row, rows, col + start, std::min(kStrip, cols - start), out + start, stride, next);
    }
  }

  // out = w_k at the entries of some rows that are not live; the others stay. Not for stored defaults.
  void overwrite_dead(int64_t row, int64_t rows, const Weight<T>& out, int64_t out_row) const {
    const int64_t cols = w_.weight.cols();
    if (w_.active == w_.count) return;
    for (int64_t col = 0; col < cols; col += kTileCols) {
      ColumnPart columns;
      if (draws_) columns = draw_.columns(col);
      for (int64_t r = 0; r < rows; r += kTileRows) {
        const Tile tile{row + r, std::min(kTileRows, rows - r), col, std::min(kTileCols, cols - col)};
        const Keep live = live_(tile);
        Drawn drawn;
        if (draws_) draw_(columns, draw_.rows(tile.row), &drawn);
        for (int64_t q = 0; q < tile.rows; ++q) {
          for_each_entry_of(~live.row[q], out, out_row + r + q, col, tile.cols,
                            [&](int64_t j, T* entry) { *entry = draws_ ? narrow<T>(widen(drawn.row[q][j])) : T{}; });
        }
      }
    }
  }

  bool overwrites() const { return w_.defaults.kind != DefaultKind::stored; }

  // The same for any col, from the whole tiles that a few rows touch.
  void anywhere(int64_t row, int64_t rows, int64_t col, int64_t cols, T* out, int64_t stride) const {
    for (int64_t r = 0; r < rows; r += kTileRows) {
      const int64_t some = std::min(kTileRows, rows - r);
      for (int64_t done = 0; done < cols;) {
        const int64_t before = (col + done) % kTileCols;
        const int64_t n = std::min(kTileCols - before, cols - done);
        T whole[kTileRows][kTileCols];
        (*this)(row + r, some, col + done - before, before + n, whole[0], kTileCols);
        for (int64_t q = 0; q < some; ++q) std::copy_n(whole[q] + before, n, out + (r + q) * stride + done);
        done += n;
      }
    }
  }

 private:
  static constexpr int64_t kStrip = 512;

  void strip(int64_t row, int64_t rows, int64_t col, int64_t cols, T* out, int64_t stride, Offset next) const {
    ColumnPart columns[kStrip / kTileCols];
    if (draws_) {
      for (int64_t c = 0; c < cols; c += kTileCols) columns[c / kTileCols] = draw_.columns(col + c);
    }
    for (int64_t r = 0; r < rows; r += kTileRows) {
      Drawer::Rows drawn_rows;
      if (draws_) drawn_rows = draw_.rows(row + r);
      for (int64_t c = 0; c < cols; c += kTileCols) {
        const Tile tile{row + r, std::min(kTileRows, rows - r), col + c, std::min(kTileCols, cols - c)};
        if (next.rows != 0 || next.cols != 0) fetch(tile, next);
        rebuild(tile, columns[c / kTileCols], drawn_rows, out + r * stride + c, stride);
      }
    }
  }

  // Tells the memory that a tile `next` rows and columns further on will be read. Inlined, since GCC takes a function
  // that does nothing else for one without effect, and drops the call.
  __attribute__((always_inline)) void fetch(const Tile& tile, Offset next) const {
    for (int64_t r = 0; r < tile.rows; ++r) {
      const int64_t row = tile.row + r + next.rows;
      const int64_t col = tile.col + next.cols;
      if (is_contiguous_) {
        const T* const entries = w_.weight.data + row * w_.weight.row_stride + col;
        for (int64_t j = 0; j < kTileCols; j += 64 / sizeof(T)) __builtin_prefetch(entries + j);
      }
      if (w_.active < w_.count && col * w_.owners.bits % 512 == 0) {
        __builtin_prefetch(w_.owners.row(row) + col * w_.owners.bits / 8);
      }
    }
  }

  void rebuild(const Tile& tile, const ColumnPart& columns, const Drawer::Rows& rows, T* out, int64_t stride) const {
    T loaded[kTileRows][kTileCols];
    const T* weight[kTileRows];
    rows_of(w_.weight, is_contiguous_, tile, loaded, weight);
    if (w_.active == w_.count) {
      for (int64_t r = 0; r < tile.rows; ++r) copy_row(weight[r], tile.cols, out + r * stride);
      return;
    }
    const Keep live = live_(tile);
    if (draws_) {
      Drawn drawn;
      draw_(columns, rows, &drawn);
      for (int64_t r = 0; r < tile.rows; ++r) select(live.row[r], weight[r], drawn.row[r], tile.cols, out + r * stride);
    } else if (w_.defaults.kind == DefaultKind::zeros) {
      static constexpr bfloat16 kZeros[kTileCols] = {};
      for (int64_t r = 0; r < tile.rows; ++r) select(live.row[r], weight[r], kZeros, tile.cols, out + r * stride);
    } else {
      T kept[kTileRows][kTileCols];
      const T* stored[kTileRows];
      rows_of(w_.stored, stored_is_contiguous_, tile, kept, stored);
      for (int64_t r = 0; r < tile.rows; ++r) select(live.row[r], weight[r], stored[r], tile.cols, out + r * stride);
    }
  }

  // Where a tile's rows are: in the weight itself, or gathered into `gathered`.
  static void rows_of(const Weight<const T>& weight, bool is_contiguous, const Tile& tile,
                      T gathered[kTileRows][kTileCols], const T* rows[kTileRows]) {
    for (int64_t r = 0; r < tile.rows; ++r) {
      if (is_contiguous) {
        rows[r] = weight.data + (tile.row + r) * weight.row_stride + tile.col;
      } else {
        for_each_entry(weight, tile.row + r, tile.col, tile.cols,
                       [&](int64_t j, const T* entry) { gathered[r][j] = *entry; });
        rows[r] = gathered[r];
      }
    }
  }

  const Subnetwork<T>& w_;
  bool is_contiguous_, stored_is_contiguous_, draws_;
  Keeper live_;
  Drawer draw_;
};

}  // namespace partkernels::cpu::PARTKERNELS_ISA
