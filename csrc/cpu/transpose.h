// Transposes words of 4 bytes.
#pragma once

#include "isa.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

// to[c * to_stride + r] = from[r * from_stride + c] for 16 x 16 words.
#if defined(PARTKERNELS_AVX512)
inline void transpose16(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
  __m512i a[16], b[16];
  for (int r = 0; r < 16; ++r) a[r] = _mm512_loadu_si512(from + r * from_stride);
  for (int r = 0; r < 16; r += 2) {
    b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
    b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
  }
  for (int r = 0; r < 16; r += 4) {  // a[r + c]: in lane l, column 4 l + c of rows r .. r + 3
    a[r] = _mm512_unpacklo_epi64(b[r], b[r + 2]);
    a[r + 1] = _mm512_unpackhi_epi64(b[r], b[r + 2]);
    a[r + 2] = _mm512_unpacklo_epi64(b[r + 1], b[r + 3]);
    a[r + 3] = _mm512_unpackhi_epi64(b[r + 1], b[r + 3]);
  }
  for (int c = 0; c < 4; ++c) {
    const __m512i front01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88),
                  back01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xDD);
    const __m512i front23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
    const __m512i back23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xDD);
    _mm512_storeu_si512(to + c * to_stride, _mm512_shuffle_i32x4(front01, front23, 0x88));
    _mm512_storeu_si512(to + (8 + c) * to_stride, _mm512_shuffle_i32x4(front01, front23, 0xDD));
    _mm512_storeu_si512(to + (4 + c) * to_stride, _mm512_shuffle_i32x4(back01, back23, 0x88));
    _mm512_storeu_si512(to + (12 + c) * to_stride, _mm512_shuffle_i32x4(back01, back23, 0xDD));
  }
}
#else
inline void transpose16(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
  for (int c = 0; c < 16; ++c) {
    for (int r = 0; r < 16; ++r) to[c * to_stride + r] = from[r * from_stride + c];
  }
}
#endif

}  // namespace partkernels::cpu::PARTKERNELS_ISA
