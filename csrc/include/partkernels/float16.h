#pragma once

#include <cstdint>

namespace partkernels {

// The bits of an IEEE binary16 number.
struct float16 {
  uint16_t bits;
};

}  // namespace partkernels
