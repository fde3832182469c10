#include "isa_includes.h"

#if defined(PARTKERNELS_X86_TARGETS)
#pragma GCC target("avx2,fma")
#define PARTKERNELS_ISA avx2
#define PARTKERNELS_AVX2
#include "operators.h"

namespace partkernels::cpu {
const Operators& avx2_operators() { return avx2::kOperators; }
}  // namespace partkernels::cpu
#endif
