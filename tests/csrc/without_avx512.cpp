// Stands for csrc/cpu/isa_avx512*.cpp where the processor has no AVX-512: nothing here is ever called there, and half a
// minute of compilation under the sanitizers is saved for each.
#include <cstdlib>

#include "operators.h"

namespace partkernels::cpu {

const Operators& avx512_operators() { std::abort(); }
const Operators& avx512_bf16_operators() { std::abort(); }
const Operators& avx512_amx_operators() { std::abort(); }
bool avx512_amx_multiplies_rightly() { std::abort(); }

}  // namespace partkernels::cpu
