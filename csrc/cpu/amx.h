// The AMX instructions that the products use, one function each. No other file has inline assembly for AMX.
//
// GCC 12's intrinsics do not declare that they read memory, so GCC may move stores to that memory behind them.
#pragma once

#include <cstdint>

namespace partkernels::cpu::amx {

// Whether the processor and the operating system support tiles, and products of bfloat16 tiles.
bool has_tiles();
bool has_products();

// Asks the operating system for permission to use tiles, for all threads and children of this process.
bool is_permitted();

// The tile configuration in the processor's format: up to 16 rows of up to 64 bytes per tile.
struct alignas(64) Configuration {
  uint8_t palette = 0, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(Configuration) == 64);

#define PARTKERNELS_INSTRUCTION __attribute__((always_inline)) inline

PARTKERNELS_INSTRUCTION void configure(const Configuration& tiles) { asm volatile("ldtilecfg %0" : : "m"(tiles)); }

PARTKERNELS_INSTRUCTION void release() { asm volatile("tilerelease"); }

template <int kTile>
PARTKERNELS_INSTRUCTION void zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

// Loads or stores the rows of a tile, which are `stride` bytes apart in memory.
template <int kTile>
PARTKERNELS_INSTRUCTION void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}

// The same for rows that are not read again soon: they do not evict other rows from the first-level cache.
template <int kTile>
PARTKERNELS_INSTRUCTION void load_once(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
PARTKERNELS_INSTRUCTION void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
}

// sum[i][j] += left[i][k] right[k][j] for pairs k of bfloat16 and floats j.
template <int kSum, int kLeft, int kRight>
PARTKERNELS_INSTRUCTION void add_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kLeft), "i"(kRight));
}

#undef PARTKERNELS_INSTRUCTION

}  // namespace partkernels::cpu::amx
