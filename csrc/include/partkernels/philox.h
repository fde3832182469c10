// Philox4x32-7, the counter-based random number generator for maps and defaults.
// Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
#pragma once

#include <cstdint>

#include "partkernels/host_device.h"

namespace partkernels {

struct Philox {
  uint32_t word[4];
};

// 7 rounds: the fewest of Philox4x32 that pass BigCrush (Salmon et al., Table 2).
constexpr int kPhiloxRounds = 7;
constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53;
constexpr uint32_t kPhiloxMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kPhiloxKeyStep0 = 0x9E3779B9;
constexpr uint32_t kPhiloxKeyStep1 = 0xBB67AE85;

PARTKERNELS_FUNCTION uint64_t wide_product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  // Without this, nvcc multiplies 64 bits and adds a zero to the upper half of each product.
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return uint64_t{a} * b;
#endif
}
PARTKERNELS_FUNCTION uint32_t low_word(uint64_t value) { return static_cast<uint32_t>(value); }
PARTKERNELS_FUNCTION uint32_t high_word(uint64_t value) { return static_cast<uint32_t>(value >> 32); }

// Four pseudorandom words for a counter of four words and a 64-bit key.
PARTKERNELS_FUNCTION Philox philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t seed) {
  uint32_t k0 = low_word(seed);
  uint32_t k1 = high_word(seed);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = wide_product(kPhiloxMultiplier0, c0);
    const uint64_t product1 = wide_product(kPhiloxMultiplier1, c2);
    c0 = high_word(product1) ^ c1 ^ k0;
    c1 = low_word(product1);
    c2 = high_word(product0) ^ c3 ^ k1;
    c3 = low_word(product0);
    k0 += kPhiloxKeyStep0;
    k1 += kPhiloxKeyStep1;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace partkernels
