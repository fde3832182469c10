// Loads 16 entries as a vector of float, and stores them.
#pragma once

#include "isa.h"
#include "partkernels/bfloat16.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

#if defined(PARTKERNELS_AVX512)
inline __m512 load16(const bfloat16* from) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// Stores the entries in the mask `exist`.
inline void store16(__m512 values, __mmask16 exist, float* to) { _mm512_mask_storeu_ps(to, exist, values); }
#endif

#if defined(PARTKERNELS_AVX512_BF16)
inline void store16(__m512 values, __mmask16 exist, bfloat16* to) {
  _mm256_mask_storeu_epi16(to, exist, (__m256i)_mm512_cvtneps_pbh(values));
}
#endif

// Whether store16 supports a type.
#if defined(PARTKERNELS_AVX512_BF16)
template <class T>
constexpr bool kStores16 = std::is_same_v<T, float> || std::is_same_v<T, bfloat16>;
#elif defined(PARTKERNELS_AVX512)
template <class T>
constexpr bool kStores16 = std::is_same_v<T, float>;
#endif

}  // namespace partkernels::cpu::PARTKERNELS_ISA
