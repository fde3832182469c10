// Instructions of compute capability 9.0: barriers that count bytes, the copy engine and warpgroup products.
#pragma once

#include "intrinsics.h"

#if defined(__CUDACC__)

namespace partkernels::cuda {

// --- barriers in shared memory, of 8 bytes ---

PARTKERNELS_DEVICE void make_barrier(SharedAddress barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes new barriers visible to the copy engine.
PARTKERNELS_DEVICE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
PARTKERNELS_DEVICE void arrive(SharedAddress barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and makes the phase wait for `bytes` bytes too.
PARTKERNELS_DEVICE void arrive_and_expect(SharedAddress barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits for the end of the phase with this parity. The first phase has parity 0, and the one before it counts as ended.
// The scope is the block: for a cluster, the compiler would invalidate the first-level cache at every wait.
PARTKERNELS_DEVICE void wait(SharedAddress barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ended;\n"
      "bra again;\n"
      "ended:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// --- the copy engine ---

// Copies the box of a matrix that begins at (row, col); the barrier counts its bytes. Entries outside of the matrix are
// 0.
PARTKERNELS_DEVICE void load_box(SharedAddress to, const TensorMap& map, int col, int row, SharedAddress barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(to),
      "l"(&map), "r"(col), "r"(row), "r"(barrier)
      : "memory");
}

// --- registers ---

template <int kCount>
PARTKERNELS_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
PARTKERNELS_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// --- products of a warpgroup: d [64, kAcross] += a [64, 16] b [16, kAcross], in float32 ---
//
// Warp w has the rows 16 w + g and 16 w + g + 8, g = lane / 4; d[4 j + e] is column 8 j + 2 (lane % 4) + e % 2 of the
// first of them for e = 0, 1 and of the second for e = 2, 3.

// Required before the first product after registers were written.
PARTKERNELS_DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PARTKERNELS_DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
PARTKERNELS_DEVICE void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// An operand in shared memory: rows of 128 bytes in groups of eight that are 1024 bytes apart. 16-byte parts are
// swizzled as by the copy engine.
PARTKERNELS_DEVICE uint64_t operand(SharedAddress address) {
  return uint64_t{(address & 0x3FFFF) >> 4} | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

// The accumulators as operands of inline assembly, and their numbers there.
#define PARTKERNELS_8(d, i)                                                                                   \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define PARTKERNELS_32(d, i) \
  PARTKERNELS_8(d, i), PARTKERNELS_8(d, i + 8), PARTKERNELS_8(d, i + 16), PARTKERNELS_8(d, i + 24)
#define PARTKERNELS_64(d, i) PARTKERNELS_32(d, i), PARTKERNELS_32(d, i + 32)
#define PARTKERNELS_128(d, i) PARTKERNELS_64(d, i), PARTKERNELS_64(d, i + 64)
#define PARTKERNELS_NAMES_32                                               \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PARTKERNELS_NAMES_64                                                         \
  PARTKERNELS_NAMES_32                                                               \
  ", "                                                                               \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PARTKERNELS_NAMES_128                                                                    \
  PARTKERNELS_NAMES_64                                                                           \
  ", "                                                                                           \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

template <class T, int kAcross>
struct Products;

// kAcross, its half, the type's name, and the numbers of the operands after the accumulators. With accumulate = 0, the
// product replaces the content of d.
#define PARTKERNELS_PRODUCTS(T, type, across, half, n0, n1, n2, n3, n4, n5)                                           \
  template <>                                                                                                         \
  struct Products<T, across> {                                                                                        \
    /* a in registers: the four words of a fragment; b [kAcross][16] in shared memory. */                             \
    static PARTKERNELS_DEVICE void add(float (&d)[half], const uint32_t (&a)[4], uint64_t b, int accumulate) {        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #n5                                                           \
                   ", 0;\n"                                                                                           \
                   "wgmma.mma_async.sync.aligned.m64n" #across "k16.f32." type "." type " {" PARTKERNELS_NAMES_##half \
                   "}, {%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", p, 1, 1, 0;\n}"                            \
                   : PARTKERNELS_##half(d, 0)                                                                         \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                            \
    }                                                                                                                 \
  };

PARTKERNELS_PRODUCTS(bfloat16, "bf16", 64, 32, 32, 33, 34, 35, 36, 37)
PARTKERNELS_PRODUCTS(bfloat16, "bf16", 128, 64, 64, 65, 66, 67, 68, 69)
PARTKERNELS_PRODUCTS(bfloat16, "bf16", 256, 128, 128, 129, 130, 131, 132, 133)
PARTKERNELS_PRODUCTS(float16, "f16", 64, 32, 32, 33, 34, 35, 36, 37)
PARTKERNELS_PRODUCTS(float16, "f16", 128, 64, 64, 65, 66, 67, 68, 69)
PARTKERNELS_PRODUCTS(float16, "f16", 256, 128, 128, 129, 130, 131, 132, 133)

#undef PARTKERNELS_PRODUCTS

}  // namespace partkernels::cuda

#endif
