#include "isa_includes.h"

#if defined(PARTKERNELS_X86_TARGETS)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#define PARTKERNELS_ISA avx512
#define PARTKERNELS_AVX2
#define PARTKERNELS_AVX512
#include "operators.h"

namespace partkernels::cpu {
const Operators& avx512_operators() { return avx512::kOperators; }
}  // namespace partkernels::cpu
#endif
