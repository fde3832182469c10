// Rebuilds blocks of a subnetwork's weight: the interface between the packed map and a multiplication.
#pragma once

#include "accumulator.h"
#include "draw_defaults.h"
#include "interleave.h"
#include "mask.h"
#include "simd.h"
#include "weight_tile.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

constexpr bfloat16 kZeros[kTileCols] = {};

#if defined(PARTKERNELS_AVX512)
// Whole vectors of a tile's row: the complete row, or its part in a panel.
template <int64_t n>
void select_vectors(uint64_t live, const float* weight, const bfloat16* dead, float* out) {
  for (int j = 0; j < n; j += 16) {
    const auto mask = static_cast<__mmask16>(live >> j);
    _mm512_storeu_ps(out + j, _mm512_mask_loadu_ps(load16(dead + j), mask, weight + j));
  }
}

template <int64_t n>
void select_vectors(uint64_t live, const bfloat16* weight, const bfloat16* dead, bfloat16* out) {
  for (int j = 0; j < n; j += 32) {
    const auto mask = static_cast<__mmask32>(live >> j);
    _mm512_storeu_si512(out + j, _mm512_mask_loadu_epi16(_mm512_loadu_si512(dead + j), mask, weight + j));
  }
}
#endif

// The bits of a piece of a row that begins at j. The asm hides their origin: GCC 12 merges this shift with those in
// select, and its code reads wrong bits for all but the first vector.
inline uint64_t bits_from(uint64_t bits, int64_t j) {
  bits >>= j;
  asm("" : "+r"(bits));
  return bits;
}

// out[j] = live bit j ? weight[j] : dead[j] for j in [0, n), n at most `most`; n == most has a faster loop.
template <int64_t most = kTileCols, class T, class Dead>
void select(uint64_t live, const T* weight, const Dead* dead, int64_t n, T* out) {
#if defined(PARTKERNELS_AVX512)
  if constexpr (!std::is_same_v<T, double> && std::is_same_v<Dead, bfloat16>) {
    if (n == most) return select_vectors<most>(live, weight, dead, out);
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

// The same if all entries are active, for whole vectors: an unrolled loop without a call.
template <int64_t n, class T>
void copy_vectors(const T* weight, T* out) {
  for (int64_t j = 0; j < n; j += kVectorBytes / sizeof(T)) {
    std::memcpy(out + j, weight + j, kVectorBytes);
  }
}

// The destination of a block, in rows. Other destinations have other layouts, in which a row of a tile is divided into
// pieces of kPiece entries.
template <class T>
struct InRows {
  static constexpr int64_t kPiece = kTileCols;
  T* data;
  int64_t stride;

  // The address of entry (row, col); col is a multiple of kPiece.
  T* at(int64_t row, int64_t col) const { return data + row * stride + col; }
  InRows from(int64_t row, int64_t col) const { return {at(row, col), stride}; }
};

struct Offset {
  int64_t rows, cols;
};

// Makes blocks of the weight of one subnetwork.
template <class T>
class Rebuilder {
 public:
  explicit Rebuilder(const Subnetwork<T>& w)
      : w_(w),
        all_live_(w.active == w.count),
        is_stored_(w.defaults.kind == DefaultKind::stored),
        draws_(!all_live_ && (w.defaults.kind == DefaultKind::uniform || w.defaults.kind == DefaultKind::normal)),
        is_contiguous_(rows_are_contiguous(w.weight)),
        stored_is_contiguous_(is_stored_ && rows_are_contiguous(w.stored)),
        live_(w.owners, w.weight.cols(), 1, w.active),
        draw_(w.defaults) {}

  // out[r * stride + c] = w_k[row + r][col + c]; col is a multiple of kTileCols. The block that begins `next` rows and
  // columns further on is prefetched.
  void operator()(int64_t row, int64_t rows, int64_t col, int64_t cols, T* out, int64_t stride,
                  Offset next = {0, 0}) const {
    make(row, rows, col, cols, InRows<T>{out, stride}, next);
  }

  // The same with any destination.
  template <class Place>
  void make(int64_t row, int64_t rows, int64_t col, int64_t cols, const Place& out, Offset next) const {
    // The part that consists of whole tiles with contiguous rows: nearly all of a layer of common size.
    const bool lie = is_contiguous_ && (all_live_ || !is_stored_ || stored_is_contiguous_);
    const int64_t whole_rows = lie ? rows / kTileRows * kTileRows : 0;
    const int64_t whole_cols = lie ? cols / kTileCols * kTileCols : 0;
    for_each_strip(col, whole_cols, [&](int64_t start, int64_t some, const ColumnPart* columns) {
      const Place to = out.from(0, start - col);
      switch (source()) {
        case Source::live:
          return whole_tiles<Source::live>(row, whole_rows, start, some, columns, to, next);
        case Source::live_or_zero:
          return whole_tiles<Source::live_or_zero>(row, whole_rows, start, some, columns, to, next);
        case Source::live_or_drawn:
          return whole_tiles<Source::live_or_drawn>(row, whole_rows, start, some, columns, to, next);
        case Source::live_or_stored:
          return whole_tiles<Source::live_or_stored>(row, whole_rows, start, some, columns, to, next);
      }
    });
    if (whole_cols < cols) {
      some_tiles({row, whole_rows, col + whole_cols, cols - whole_cols}, out.from(0, whole_cols));
    }
    if (whole_rows < rows) some_tiles({row + whole_rows, rows - whole_rows, col, cols}, out.from(whole_rows, 0));
  }

  // Returns the block's location. If all entries are active and the weight's rows have the required layout, this is in
  // the weight itself; otherwise the block is written to `out`. In both cases it can be read in words of 4 bytes, up to
  // a multiple of 32 entries. Rows of the weight itself are whole tiles.
  Rows<T> rows_of(int64_t row, int64_t rows, int64_t col, int64_t cols, T* out, int64_t stride, Offset next) const {
    const Rows<T> there{w_.weight.data + row * w_.weight.row_stride + col, w_.weight.row_stride};
    const bool has_words = reinterpret_cast<uintptr_t>(there.data) % 4 == 0 && there.stride * sizeof(T) % 4 == 0;
    if (!all_live_ || !is_contiguous_ || rows % kTileRows != 0 || cols % 32 != 0 || !has_words) {
      (*this)(row, rows, col, cols, out, stride, next);
      return {out, stride};
    }
    const T* const fetched = there.data + next.rows * there.stride + next.cols;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; c += 64 / sizeof(T)) __builtin_prefetch(fetched + r * there.stride + c);
    }
    return there;
  }

  // out[i * stride + c] = w_k[ids[i]][c] for i in [0, count).
  void gather(const int64_t* ids, int64_t count, T* out, int64_t stride) const {
    some_tiles({0, count, 0, w_.weight.cols(), ids}, InRows<T>{out, stride});
  }

  // out[r * stride + c] = kLive if (row + r, c) is active, its default otherwise, for all columns.
  void mark(int64_t row, int64_t rows, bfloat16* out, int64_t stride) const {
    for_each_drawn_tile({row, rows, 0, w_.weight.cols()},
                        [&](const Tile& tile, const ColumnPart& columns, const RowsPart& part) {
                          const TileMask live = live_(tile);
                          Drawn drawn;
                          if (draws_) draw_(columns, part, &drawn);
                          for (int64_t r = 0; r < tile.rows; ++r) {
                            mark_live(live.row[r], draws_ ? drawn.row[r] : kZeros, tile.cols,
                                      out + (tile.row - row + r) * stride + tile.col);
                          }
                        });
  }

  // The same as operator() for any col, from all tiles that the block overlaps.
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
  using RowsPart = Drawer::Rows;
  static constexpr int64_t kStrip = 512;

  // Calls use(start, cols, columns) for strips of columns, with the part of the draws that the tiles of a strip share.
  template <class Use>
  void for_each_strip(int64_t col, int64_t cols, const Use& use) const {
    for (int64_t start = col; start < col + cols; start += kStrip) {
      const int64_t some = std::min(kStrip, col + cols - start);
      ColumnPart columns[kStrip / kTileCols];
      if (draws_) {
        for (int64_t c = 0; c < some; c += kTileCols) columns[c / kTileCols] = draw_.columns(start + c);
      }
      use(start, some, columns);
    }
  }

  // Calls use(tile, columns, rows) for the tiles of a block.
  template <class Use>
  void for_each_drawn_tile(const Tile& block, const Use& use) const {
    for_each_strip(block.col, block.cols, [&](int64_t start, int64_t some, const ColumnPart* columns) {
      for (int64_t r = 0; r < block.rows; r += kTileRows) {
        Tile tile{block.row + r, std::min(kTileRows, block.rows - r), start, some, block.ids};
        RowsPart part;
        if (draws_) part = draw_.rows(tile);
        for (int64_t c = 0; c < some; c += kTileCols) {
          tile.col = start + c;
          tile.cols = std::min(kTileCols, some - c);
          use(tile, columns[c / kTileCols], part);
        }
      }
    });
  }

  // The sources of a block's entries.
  enum class Source { live, live_or_zero, live_or_drawn, live_or_stored };

  Source source() const {
    if (all_live_) return Source::live;
    if (is_stored_) return Source::live_or_stored;
    return draws_ ? Source::live_or_drawn : Source::live_or_zero;
  }

  // A separate function for each source, with copies of the fields that its loops read, so that everything stays in
  // registers.
  template <Source source, class Place>
  __attribute__((noinline)) void whole_tiles(int64_t row, int64_t rows, int64_t col, int64_t cols,
                                             const ColumnPart* columns, const Place out, Offset next) const {
    constexpr int64_t kPiece = Place::kPiece;
    const MaskDecoder live = live_;
    const Drawer draw = draw_;
    const Owners owners = w_.owners;
    const int64_t row_stride = w_.weight.row_stride;
    for (int64_t r = 0; r < rows; r += kTileRows) {
      const T* const weight = w_.weight.data + (row + r) * row_stride + col;
      const T* const next_weight = weight + next.rows * row_stride + next.cols;
      const uint8_t* const next_map = owners.row(row + r + next.rows) + (col + next.cols) * owners.bits / 8;
      RowsPart part;
      if (source == Source::live_or_drawn) part = draw.rows(Tile{row + r, kTileRows, col, cols});
      for (int64_t c = 0; c < cols; c += kTileCols) {
        for (int64_t q = 0; q < kTileRows; ++q) {
          fetch(next_weight + q * row_stride + c);
          if (source != Source::live) __builtin_prefetch(next_map + q * owners.row_bytes + c * owners.bits / 8);
        }
        TileMask mask;
        if (source != Source::live) mask = live(Tile{row + r, kTileRows, col + c, kTileCols});
        Drawn drawn;
        if (source == Source::live_or_drawn) draw(columns[c / kTileCols], part, &drawn);
        for (int64_t q = 0; q < kTileRows; ++q) {
          const T* const entries = weight + q * row_stride + c;
          const T* stored = nullptr;
          if constexpr (source == Source::live_or_stored) {
            stored = w_.stored.data + (row + r + q) * w_.stored.row_stride + col + c;
            fetch(stored + next.rows * w_.stored.row_stride + next.cols);
          }
          for (int64_t j = 0; j < kTileCols; j += kPiece) {
            T* const to = out.at(r + q, c + j);
            if constexpr (source == Source::live) {
              copy_vectors<kPiece>(entries + j, to);
            } else if constexpr (source == Source::live_or_zero) {
              select<kPiece>(bits_from(mask.row[q], j), entries + j, kZeros, kPiece, to);
            } else if constexpr (source == Source::live_or_drawn) {
              select<kPiece>(bits_from(mask.row[q], j), entries + j, drawn.row[q] + j, kPiece, to);
            } else {
              select<kPiece>(bits_from(mask.row[q], j), entries + j, stored + j, kPiece, to);
            }
          }
        }
      }
    }
  }

  // Prefetches a tile's row. Inlined, since GCC considers a function that only prefetches to have no effect, and drops
  // the call.
  __attribute__((always_inline)) static void fetch(const T* entries) {
    for (int64_t j = 0; j < kTileCols; j += 64 / sizeof(T)) __builtin_prefetch(entries + j);
  }

  template <class Place>
  void some_tiles(const Tile& block, const Place& out) const {
    for_each_drawn_tile(block, [&](const Tile& tile, const ColumnPart& columns, const RowsPart& part) {
      T gathered[kTileRows][kTileCols], gathered_stored[kTileRows][kTileCols];
      const Place to = out.from(tile.row - block.row, tile.col - block.col);
      copy_tile(w_.weight, tile, gathered);
      TileMask live = {};
      Drawn drawn = {};
      if (!all_live_) live = live_(tile);
      if (draws_) draw_(columns, part, &drawn);
      if (is_stored_ && !all_live_) copy_tile(w_.stored, tile, gathered_stored);
      for (int64_t r = 0; r < tile.rows; ++r) {
        for (int64_t j = 0; j < tile.cols; j += Place::kPiece) {
          const int64_t n = std::min(Place::kPiece, tile.cols - j);
          if (all_live_) {
            std::copy_n(gathered[r] + j, n, to.at(r, j));
          } else if (is_stored_) {
            select<Place::kPiece>(bits_from(live.row[r], j), gathered[r] + j, gathered_stored[r] + j, n, to.at(r, j));
          } else {
            select<Place::kPiece>(bits_from(live.row[r], j), gathered[r] + j, drawn.row[r] + j, n, to.at(r, j));
          }
        }
      }
    });
  }

  static void copy_tile(const Weight<const T>& weight, const Tile& tile, T to[kTileRows][kTileCols]) {
    for (int64_t r = 0; r < tile.rows; ++r) {
      for_each_run(weight, tile.row_at(r), tile.col, tile.cols, [&](int64_t j, int64_t n, const T* from) {
        if (weight.in_stride == 1) {
          std::copy_n(from, n, to[r] + j);
        } else {
          for (int64_t i = 0; i < n; ++i) to[r][j + i] = from[i * weight.in_stride];
        }
      });
    }
  }

  const Subnetwork<T>& w_;
  bool all_live_, is_stored_, draws_, is_contiguous_, stored_is_contiguous_;
  MaskDecoder live_;
  Drawer draw_;
};

}  // namespace partkernels::cpu::PARTKERNELS_ISA
