#include "philox_lanes.h"

#include "isa.h"
#include "partkernels/philox.h"

namespace partkernels::cpu {

PARTKERNELS_CLONES
void philox_lanes(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t seed, uint32_t words[4][kLanes]) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const Philox drawn = philox4x32(c0 + static_cast<uint32_t>(lane), c1, c2, c3, seed);
    words[0][lane] = drawn.word[0];
    words[1][lane] = drawn.word[1];
    words[2][lane] = drawn.word[2];
    words[3][lane] = drawn.word[3];
  }
}

}  // namespace partkernels::cpu
