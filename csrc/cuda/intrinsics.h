// The GPU instructions that the kernels use, one function each. Only this file and hopper_intrinsics.h have inline
// assembly.
//
// Without nvcc, an emulator on the CPU defines these functions; the tests run the same kernels on it.
#pragma once

#if !defined(__CUDACC__)
#include "emulated_gpu.h"
#else

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#define PARTKERNELS_KERNEL __global__
#define PARTKERNELS_DEVICE __device__ __forceinline__
// A kernel argument with tensor maps, which the copy engine reads in place.
#define PARTKERNELS_ARGUMENT const __grid_constant__
#define PARTKERNELS_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define PARTKERNELS_UNROLL _Pragma("unroll")

#include "partkernels/bfloat16.h"
#include "partkernels/cuda.h"

namespace partkernels::cuda {

using TensorMap = CUtensorMap;

// An address in a block's shared memory.
using SharedAddress = uint32_t;

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;

PARTKERNELS_FUNCTION int min_of(int a, int b) { return a < b ? a : b; }
PARTKERNELS_FUNCTION int max_of(int a, int b) { return a < b ? b : a; }
PARTKERNELS_FUNCTION int divide_up(int a, int b) { return (a + b - 1) / b; }

PARTKERNELS_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
PARTKERNELS_DEVICE int block_index() { return static_cast<int>(blockIdx.x); }
PARTKERNELS_DEVICE int blocks() { return static_cast<int>(gridDim.x); }
PARTKERNELS_DEVICE int threads() { return static_cast<int>(blockDim.x); }
PARTKERNELS_DEVICE void synchronize_block() { __syncthreads(); }

// The block's dynamic shared memory.
PARTKERNELS_DEVICE char* shared_memory() {
  extern __shared__ __align__(1024) char memory[];
  return memory;
}
PARTKERNELS_DEVICE SharedAddress shared_address(const void* pointer) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(pointer));
}

// --- bits and packed pairs ---

// Each nibble of the selector picks a byte of the two words, or the byte's sign bit, repeated.
PARTKERNELS_DEVICE uint32_t select_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
}
// Bit by bit: `then` where the mask is set, `otherwise` elsewhere.
PARTKERNELS_DEVICE uint32_t select_bits(uint32_t mask, uint32_t then, uint32_t otherwise) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(result) : "r"(mask), "r"(then), "r"(otherwise));
  return result;
}
// a * b + c for pairs of bfloat16 numbers, rounded once.
PARTKERNELS_DEVICE uint32_t multiply_add_pairs(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}
PARTKERNELS_DEVICE uint32_t pair_of_bfloat16(float low, float high) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
PARTKERNELS_DEVICE uint32_t pair_of_float16(float low, float high) {
  uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
template <class T>
PARTKERNELS_DEVICE uint32_t pair_of(float low, float high) {
  return std::is_same_v<T, bfloat16> ? pair_of_bfloat16(low, high) : pair_of_float16(low, high);
}
PARTKERNELS_DEVICE float as_float(bfloat16 value) { return to_float(value); }
PARTKERNELS_DEVICE float as_float(float16 value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}
template <class T>
PARTKERNELS_DEVICE T from_float(float value) {
  return T{static_cast<uint16_t>(pair_of<T>(value, 0) & 0xFFFF)};
}
// The sum of a word's four bytes and an addend.
PARTKERNELS_DEVICE int add_bytes(uint32_t word, int addend) {
  return static_cast<int>(__dp4a(word, 0x01010101u, static_cast<uint32_t>(addend)));
}
PARTKERNELS_DEVICE uint32_t from_neighbour_lane(uint32_t value) { return __shfl_xor_sync(0xFFFFFFFF, value, 1); }

// Words, aligned to their total size or to 16 bytes.
PARTKERNELS_DEVICE void load_words(const uint32_t* from, uint32_t (&to)[1]) { to[0] = *from; }
PARTKERNELS_DEVICE void load_words(const uint32_t* from, uint32_t (&to)[2]) {
  const uint2 words = *reinterpret_cast<const uint2*>(from);
  to[0] = words.x;
  to[1] = words.y;
}
PARTKERNELS_DEVICE void load_words(const uint32_t* from, uint32_t (&to)[4]) {
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  to[0] = words.x;
  to[1] = words.y;
  to[2] = words.z;
  to[3] = words.w;
}
PARTKERNELS_DEVICE void load_words(const uint32_t* from, uint32_t (&to)[8]) {
  uint32_t half[4];
  load_words(from, half);
  for (int i = 0; i < 4; ++i) to[i] = half[i];
  load_words(from + 4, half);
  for (int i = 0; i < 4; ++i) to[4 + i] = half[i];
}

PARTKERNELS_DEVICE void store_words(uint32_t* to, const uint32_t (&words)[1]) { *to = words[0]; }
PARTKERNELS_DEVICE void store_words(uint32_t* to, const uint32_t (&words)[2]) {
  *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
}
PARTKERNELS_DEVICE void store_words(uint32_t* to, const uint32_t (&words)[4]) {
  *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

// --- asynchronous copies by threads (from compute capability 8.0 on) ---

// Copies up to 16 bytes, and writes zeros in place of the rest of 16.
PARTKERNELS_DEVICE void copy_async(SharedAddress to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
PARTKERNELS_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's groups of copies are pending.
template <int kPending>
PARTKERNELS_DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- tensor cores, a warp at a time ---

// Four 8x8 matrices of 16-bit entries; lane l gives the address of row l % 8 of matrix l / 8, and gets the entries 2 (l
// % 4) and 2 (l % 4) + 1 of row l / 4 of each.
PARTKERNELS_DEVICE void load_matrices(SharedAddress row, uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}
// Stores the transposed matrices (from compute capability 9.0 on).
PARTKERNELS_DEVICE void store_transposed_matrices(SharedAddress row, const uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(from[0]),
               "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

// d [16, 8] += a [16, 16] b [16, 8]: d[e] of lane l is row l / 4 + 8 (e / 2), column 2 (l % 4) + e % 2.
template <class T>
PARTKERNELS_DEVICE void add_product(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

PARTKERNELS_DEVICE void synchronize_warp() { __syncwarp(); }

}  // namespace partkernels::cuda

#endif
