#pragma once

#include <cstdint>

namespace partkernels {

// IEEE's binary16, as its bits.
struct float16 {
  uint16_t bits;
};

}  // namespace partkernels
