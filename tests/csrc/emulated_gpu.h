// An emulator, on a CPU, of the GPU instructions in csrc/cuda/intrinsics.h and hopper_intrinsics.h, to test the kernels
// without a GPU.
//
// Each thread of a block is a fiber; fibers switch where the hardware could wait. Asynchronous work of the hardware
// (copies, products of a warpgroup) is done as late as a correct kernel allows, or earlier at random. So a kernel
// without a required wait gives wrong results, and a kernel that waits forever is reported with its threads.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>
#include <vector>

#include "partkernels/bfloat16.h"
#include "partkernels/cuda.h"

#define PARTKERNELS_KERNEL
#define PARTKERNELS_DEVICE inline
#define PARTKERNELS_ARGUMENT const
#define PARTKERNELS_BOUNDS(threads, blocks)
#define PARTKERNELS_UNROLL

namespace partkernels::cuda {

float16 to_float16(float value);
float as_float(float16 value);
inline float as_float(bfloat16 value) { return to_float(value); }

// A matrix in global memory and the size of the box that is copied.
struct TensorMap {
  const char* data;
  int64_t rows, cols, row_bytes;
  int entry_bytes, box_rows, box_cols;
  bool is_swizzled;
};

// An address in a block's shared memory.
using SharedAddress = uint32_t;

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;

inline int min_of(int a, int b) { return a < b ? a : b; }
inline int max_of(int a, int b) { return a < b ? b : a; }
inline int divide_up(int a, int b) { return (a + b - 1) / b; }

namespace emulated {

// Options that the tests set.
struct Options {
  int major = 9, minor = 0, multiprocessors = 3;
  int shared_memory = 227 << 10;
  uint32_t seed = 0;
};
extern Options options;

void run(int blocks, int threads, int shared_bytes, const std::function<void()>& kernel);

// Functions for the running thread.
int thread_index();
int block_index();
int blocks();
int threads();
char* shared_memory();
char* at(SharedAddress address, int bytes);
void fail(const char* what);

// Blocks until `size` threads of this group have called it.
enum class Group { warp, warpgroup, block };
void meet(Group group, int number, int size);

// Each member contributes `bytes` bytes and gets those of all members, in order.
void exchange(Group group, int size, const void* own, void* all, int bytes);
template <class T, int kSize>
std::array<T, kSize> exchange(const T& own) {
  std::array<T, kSize> all;
  exchange(kSize == kWarp ? Group::warp : Group::warpgroup, kSize, &own, all.data(), sizeof(T));
  return all;
}

// Schedules work that the hardware does asynchronously, at any time.
void later(std::function<void()> work);
// The same, for work that is complete once the thread waits for its groups of copies, or the warpgroup for its
// products.
void at_wait_for_copies(std::function<void()> work);
void commit_copies();
void wait_for_copies(int pending);
void at_wait_for_products(std::function<void()> work);
void commit_products();
void wait_for_products(int pending);

// Whether sizes, strides and boxes meet the requirements of cuTensorMapEncodeTiled.
bool takes_map(const TensorMap& map);

void make_barrier(SharedAddress barrier, int arrivals);
void arrive(SharedAddress barrier, int bytes);
void complete(SharedAddress barrier, int bytes);
void wait(SharedAddress barrier, int parity);

SharedAddress swizzled(SharedAddress address);
void multiply_warpgroup(float* const* d, const uint32_t* const* a, uint64_t b, int across, bool accumulate,
                        float (*widen)(uint16_t));

template <class T>
float widen(uint16_t bits) {
  return as_float(T{bits});
}

}  // namespace emulated

inline int thread_index() { return emulated::thread_index(); }
inline int block_index() { return emulated::block_index(); }
inline int blocks() { return emulated::blocks(); }
inline int threads() { return emulated::threads(); }
inline void synchronize_block() { emulated::meet(emulated::Group::block, 0, threads()); }
inline void synchronize_warp() { emulated::meet(emulated::Group::warp, thread_index() / kWarp, kWarp); }
inline char* shared_memory() { return emulated::shared_memory(); }
SharedAddress shared_address(const void* pointer);

// --- bits and packed pairs ---

inline uint32_t select_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t both = uint64_t{high} << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> (4 * i) & 0xF, byte = both >> (8 * (nibble & 7)) & 0xFF;
    result |= (nibble & 8 ? (byte & 0x80 ? 0xFF : 0) : byte) << (8 * i);
  }
  return result;
}
inline uint32_t select_bits(uint32_t mask, uint32_t then, uint32_t otherwise) {
  return (mask & then) | (~mask & otherwise);
}
inline uint32_t pair_of_bfloat16(float low, float high) {
  return to_bfloat16(low).bits | uint32_t{to_bfloat16(high).bits} << 16;
}
inline uint32_t pair_of_float16(float low, float high) {
  return to_float16(low).bits | uint32_t{to_float16(high).bits} << 16;
}
inline uint32_t multiply_add_pairs(uint32_t a, uint32_t b, uint32_t c) {
  const auto part = [](uint32_t pair, int i) { return to_float(bfloat16{static_cast<uint16_t>(pair >> (16 * i))}); };
  return pair_of_bfloat16(std::fma(part(a, 0), part(b, 0), part(c, 0)), std::fma(part(a, 1), part(b, 1), part(c, 1)));
}
template <class T>
uint32_t pair_of(float low, float high) {
  return std::is_same_v<T, bfloat16> ? pair_of_bfloat16(low, high) : pair_of_float16(low, high);
}
template <class T>
T from_float(float value) {
  return T{static_cast<uint16_t>(pair_of<T>(value, 0) & 0xFFFF)};
}
inline int add_bytes(uint32_t word, int addend) {
  return static_cast<int>((word & 0xFF) + (word >> 8 & 0xFF) + (word >> 16 & 0xFF) + (word >> 24)) + addend;
}
inline uint32_t from_neighbour_lane(uint32_t value) {
  return emulated::exchange<uint32_t, kWarp>(value)[thread_index() % kWarp ^ 1];
}

template <int kCount>
void load_words(const uint32_t* from, uint32_t (&to)[kCount]) {
  if (reinterpret_cast<uintptr_t>(from) % std::min<size_t>(16, sizeof(to)) != 0) emulated::fail("unaligned words");
  std::memcpy(to, from, sizeof(to));
}
template <int kCount>
void store_words(uint32_t* to, const uint32_t (&words)[kCount]) {
  if (reinterpret_cast<uintptr_t>(to) % sizeof(words) != 0) emulated::fail("unaligned words");
  std::memcpy(to, words, sizeof(words));
}

// --- asynchronous copies by threads ---

inline void copy_async(SharedAddress to, const void* from, int bytes) {
  if (to % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) emulated::fail("unaligned copy");
  emulated::at_wait_for_copies([=, there = emulated::at(to, 16)] {
    std::memset(there, 0, 16);
    std::memcpy(there, from, static_cast<size_t>(bytes));
  });
}
inline void commit_copies() { emulated::commit_copies(); }
template <int kPending>
void wait_for_copies() {
  emulated::wait_for_copies(kPending);
}

// --- matrices ---

namespace emulated {

// The address of entry `entry` of row `row` of the i-th matrix; `rows` has the row addresses from all lanes.
inline char* entry_of_matrix(const std::array<SharedAddress, kWarp>& rows, int i, int row, int entry) {
  if (rows[8 * i + row] % 16 != 0) fail("unaligned row of a matrix");
  return at(rows[8 * i + row], 16) + 2 * entry;
}

}  // namespace emulated

inline void load_matrices(SharedAddress row, uint32_t (&to)[4]) {
  const auto rows = emulated::exchange<SharedAddress, kWarp>(row);
  const int lane = thread_index() % kWarp;
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int e = 0; e < 2; ++e) {
      std::memcpy(&pair[e], emulated::entry_of_matrix(rows, i, lane / 4, 2 * (lane % 4) + e), 2);
    }
    to[i] = pair[0] | uint32_t{pair[1]} << 16;
  }
}

inline void store_transposed_matrices(SharedAddress row, const uint32_t (&from)[4]) {
  const auto rows = emulated::exchange<SharedAddress, kWarp>(row);
  const int lane = thread_index() % kWarp;
  for (int i = 0; i < 4; ++i) {
    for (int e = 0; e < 2; ++e) {
      const auto entry = static_cast<uint16_t>(from[i] >> (16 * e));
      std::memcpy(emulated::entry_of_matrix(rows, i, 2 * (lane % 4) + e, lane / 4), &entry, 2);
    }
  }
}

template <class T>
void add_product(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Given {
    uint32_t a[4], b[2];
  };
  const auto all = emulated::exchange<Given, kWarp>(Given{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int lane = thread_index() % kWarp;
  const auto entry = [](uint32_t pair, int i) { return emulated::widen<T>(static_cast<uint16_t>(pair >> (16 * i))); };
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4 + 8 * (e / 2), col = 2 * (lane % 4) + e % 2;
    for (int t = 0; t < 16; ++t) {
      const Given &left = all[row % 8 * 4 + t % 8 / 2], &right = all[col * 4 + t % 8 / 2];
      d[e] += entry(left.a[row / 8 + 2 * (t / 8)], t % 2) * entry(right.b[t / 8], t % 2);
    }
  }
}

// --- barriers, the copy engine ---

inline void make_barrier(SharedAddress barrier, int arrivals) { emulated::make_barrier(barrier, arrivals); }
inline void publish_barriers() {}
inline void arrive(SharedAddress barrier) { emulated::arrive(barrier, 0); }
inline void arrive_and_expect(SharedAddress barrier, int bytes) { emulated::arrive(barrier, bytes); }
inline void wait(SharedAddress barrier, int parity) { emulated::wait(barrier, parity); }
void load_box(SharedAddress to, const TensorMap& map, int col, int row, SharedAddress barrier);

template <int kCount>
void give_registers() {}
template <int kCount>
void take_registers() {}

// --- products of a warpgroup ---

inline void begin_products() {}
inline void commit_products() { emulated::commit_products(); }
template <int kPending>
void wait_for_products() {
  emulated::wait_for_products(kPending);
}
inline uint64_t operand(SharedAddress address) {
  return uint64_t{(address & 0x3FFFF) >> 4} | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

template <class T, int kAcross>
struct Products {
  struct Given {
    float* d;
    const uint32_t* a;
  };

  static void add(float (&d)[kAcross / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    const auto all = emulated::exchange<Given, kWarpgroup>(Given{d, a});
    if (thread_index() % kWarpgroup != 0) return;
    emulated::at_wait_for_products([=] {
      float* ds[kWarpgroup];
      const uint32_t* as[kWarpgroup];
      for (int i = 0; i < kWarpgroup; ++i) ds[i] = all[i].d, as[i] = all[i].a;
      emulated::multiply_warpgroup(ds, as, b, kAcross, accumulate != 0, &emulated::widen<T>);
    });
  }
};

}  // namespace partkernels::cuda
