#pragma once

#include <cstdint>
#include <cstring>

#include "partkernels/host_device.h"

namespace partkernels {

// The upper half of a float32. Bit-compatible with every library's bfloat16.
struct bfloat16 {
  uint16_t bits;
};

PARTKERNELS_FUNCTION uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

PARTKERNELS_FUNCTION float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

PARTKERNELS_FUNCTION float to_float(bfloat16 value) { return float_from_bits(uint32_t{value.bits} << 16); }

// Rounds to nearest, ties to even; NaN stays NaN.
PARTKERNELS_FUNCTION bfloat16 to_bfloat16(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return {static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded)};
}

}  // namespace partkernels
