#include "isa_includes.h"

#define PARTKERNELS_ISA portable
#include "operators.h"

namespace partkernels::cpu {
const Operators& portable_operators() { return portable::kOperators; }
}  // namespace partkernels::cpu
