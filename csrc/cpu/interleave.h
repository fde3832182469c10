// Computes rows of a contiguous convolution weight, with the taps of a channel together, from marks in the order of the
// map's columns: active entries, and the defaults of the others.
#pragma once

#include "accumulator.h"
#include "isa.h"
#include "partkernels/bfloat16.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

#if defined(PARTKERNELS_AVX512)
constexpr int64_t kInterleaved = 32, kTogether = 8;

// to[c * to_stride + r] = from[r * from_stride + c] for r in [0, rows), at most kTogether, and kInterleaved columns c.
inline void interleave32(const bfloat16* from, int64_t from_stride, int64_t rows, bfloat16* to, int64_t to_stride) {
  __m512i a[kTogether], b[kTogether], c[kTogether];
  for (int r = 0; r < kTogether; ++r) {
    a[r] = r < rows ? _mm512_loadu_si512(from + r * from_stride) : _mm512_setzero_si512();
  }
  for (int r = 0; r < kTogether; r += 2) {  // b[r + h]: in lane l, columns 8 l + 4 h .. + 3 of rows r and r + 1
    b[r] = _mm512_unpacklo_epi16(a[r], a[r + 1]);
    b[r + 1] = _mm512_unpackhi_epi16(a[r], a[r + 1]);
  }
  for (int r = 0; r < kTogether; r += 4) {  // c[r + i]: in lane l, columns 8 l + 2 i and + 1 of rows r .. r + 3
    for (int h = 0; h < 2; ++h) {
      c[r + 2 * h] = _mm512_unpacklo_epi32(b[r + h], b[r + 2 + h]);
      c[r + 2 * h + 1] = _mm512_unpackhi_epi32(b[r + h], b[r + 2 + h]);
    }
  }
  const auto exist = static_cast<__mmask8>((1 << rows) - 1);
  for (int i = 0; i < kTogether; ++i) {  // in lane l, column 8 l + i of all rows
    const __m512i all =
        i % 2 == 0 ? _mm512_unpacklo_epi64(c[i / 2], c[4 + i / 2]) : _mm512_unpackhi_epi64(c[i / 2], c[4 + i / 2]);
    const __m128i lanes[4] = {_mm512_castsi512_si128(all), _mm512_extracti32x4_epi32(all, 1),
                              _mm512_extracti32x4_epi32(all, 2), _mm512_extracti32x4_epi32(all, 3)};
    for (int l = 0; l < 4; ++l) {
      bfloat16* const there = to + (8 * l + i) * to_stride;
      if (rows == kTogether) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(there), lanes[l]);
      } else {
        _mm_mask_storeu_epi16(there, exist, lanes[l]);
      }
    }
  }
}
#endif

// to[j * taps + tap] = from[tap * in + j].
inline void interleave(const bfloat16* from, int64_t in, int64_t taps, bfloat16* to) {
  int64_t done = 0;  // channels
#if defined(PARTKERNELS_AVX512)
  for (; done + kInterleaved <= in; done += kInterleaved) {
    for (int64_t tap = 0; tap < taps; tap += kTogether) {
      interleave32(from + tap * in + done, in, std::min(kTogether, taps - tap), to + done * taps + tap, taps);
    }
  }
#endif
  for (int64_t tap = 0; tap < taps; ++tap) {
    for (int64_t j = done; j < in; ++j) to[j * taps + tap] = from[tap * in + j];
  }
}

// Marks an active entry among defaults: a NaN, which no default is.
constexpr bfloat16 kLive = {0xFFFF};

// out[j] = live bit j ? kLive : dead[j] for j in [0, n), n at most 64.
inline void mark_live(uint64_t live, const bfloat16* dead, int64_t n, bfloat16* out) {
#if defined(PARTKERNELS_AVX512)
  if (n == 64) {
    for (int j = 0; j < 64; j += 32) {
      const auto mask = static_cast<__mmask32>(live >> j);
      _mm512_storeu_si512(out + j, _mm512_mask_set1_epi16(_mm512_loadu_si512(dead + j), mask, -1));
    }
    return;
  }
#endif
  for (int64_t j = 0; j < n; ++j) out[j] = live >> j & 1 ? kLive : dead[j];
}

// out[j] = marked[j] is kLive ? weight[j] : others(j, marked[j]) for j in [0, n).
template <class T, class Others>
void select_marked(const bfloat16* marked, const T* weight, int64_t n, T* out, const Others& others) {
  for (int64_t j = 0; j < n; ++j) {
    const T entry = weight[j], other = others(j, marked[j]);  // reads both, so that the loop has no branch
    if constexpr (std::is_same_v<T, bfloat16>) {
      out[j].bits = marked[j].bits == kLive.bits ? entry.bits : other.bits;
    } else {
      out[j] = marked[j].bits == kLive.bits ? entry : other;
    }
  }
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
