// Philox for consecutive counters, a vector of them at a time.
#pragma once

#include <cstdint>

namespace partkernels::cpu {

constexpr int kLanes = 16;

// words[w][lane] = word w for the counter (c0 + lane, c1, c2, c3). c0 + lane must not overflow.
void philox_lanes(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t seed, uint32_t words[4][kLanes]);

}  // namespace partkernels::cpu
