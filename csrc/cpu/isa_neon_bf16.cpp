#include "isa_includes.h"

#if defined(PARTKERNELS_ARM_TARGETS)
#pragma GCC target("arch=armv8.2-a+bf16")
#define PARTKERNELS_ISA neon_bf16
#define PARTKERNELS_NEON_BF16
#include "operators.h"

namespace partkernels::cpu {
const Operators& neon_bf16_operators() { return neon_bf16::kOperators; }
}  // namespace partkernels::cpu
#endif
