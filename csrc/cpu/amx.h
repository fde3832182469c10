// What the products ask of AMX, an instruction a function: inline assembly is here alone.
//
// GCC 12's own functions do not tell it that they read memory, so it may move what is written there behind them.
#pragma once

#include <cstdint>

namespace partkernels::cpu::amx {

// Whether the processor and the system have tiles, and their products of bfloat16.
bool has_tiles();
bool has_products();

// Asks the system to let this process use tiles: all its threads, and its children.
bool is_permitted();

// What the tiles are, as the processor reads it: up to 16 rows of up to 64 bytes each.
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

// Rows of a tile from and to memory, where they are `stride` bytes apart.
template <int kTile>
PARTKERNELS_INSTRUCTION void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}

// The same of rows that are not read again soon: they take no place in the first-level cache from those that are.
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
