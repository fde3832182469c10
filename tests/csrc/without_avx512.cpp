// Replaces csrc/cpu/isa_avx512*.cpp on processors without AVX-512, where these functions are never called. This saves
// half a minute of compilation under the sanitizers for each file.
#include <cstdlib>

#include "operators.h"

namespace partkernels::cpu {

const Operators& avx512_operators() { std::abort(); }
const Operators& avx512_bf16_operators() { std::abort(); }
const Operators& avx512_amx_operators() { std::abort(); }
bool avx512_amx_multiplies_rightly() { std::abort(); }

}  // namespace partkernels::cpu
