#include "isa_includes.h"

#if defined(PARTKERNELS_X86_TARGETS)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,fma")
#define PARTKERNELS_ISA avx512_bf16
#define PARTKERNELS_AVX2
#define PARTKERNELS_AVX512
#define PARTKERNELS_AVX512_BF16
#include "operators.h"

namespace partkernels::cpu {
const Operators& avx512_bf16_operators() { return avx512_bf16::kOperators; }
}  // namespace partkernels::cpu
#endif
