// The list of the CPU operators, and the table of them for each instruction set.
//
// An isa_*.cpp includes this file twice: through isa_includes.h, before it sets its instruction set, for the table's
// type; and afterwards for the kernels.
#if !defined(PARTKERNELS_OPERATORS)

#include "partkernels/cpu.h"

// The operators for each dtype: use(linear) use(linear_grad_input) and so on.
// clang-format off
#define PARTKERNELS_OPERATORS(use) \
  use(linear)                      \
  use(linear_grad_input)           \
  use(linear_grad_weight)          \
  use(conv2d)                      \
  use(conv2d_grad_input)           \
  use(few_channels_grad_input)     \
  use(conv2d_grad_weight)          \
  use(subnetwork_weight)           \
  use(subnetwork_weight_grad)      \
  use(embedding)                   \
  use(gather_entries)              \
  use(scatter_entries)             \
  use(sgd_step)                    \
  use(adam_step)
// clang-format on

// Whether the compiler supports functions for instruction sets beyond its own target.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PARTKERNELS_X86_TARGETS
#elif defined(__aarch64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define PARTKERNELS_ARM_TARGETS
#endif

namespace partkernels::cpu {

template <class T>
struct OperatorsOn {
#define PARTKERNELS_POINTER(name) decltype(&cpu::name<T>) name;
  PARTKERNELS_OPERATORS(PARTKERNELS_POINTER)
#undef PARTKERNELS_POINTER
};

struct Operators {
  OperatorsOn<float> on_float;
  OperatorsOn<double> on_double;
  OperatorsOn<bfloat16> on_bfloat16;
  decltype(&cpu::random_map) random_map;
  decltype(&cpu::count_entries) count_entries;
};

const Operators& portable_operators();
#if defined(PARTKERNELS_X86_TARGETS)
const Operators& avx2_operators();
const Operators& avx512_operators();
const Operators& avx512_bf16_operators();
const Operators& avx512_amx_operators();
bool avx512_amx_multiplies_rightly();
#elif defined(PARTKERNELS_ARM_TARGETS)
const Operators& neon_bf16_operators();
#endif

}  // namespace partkernels::cpu

#endif

#if defined(PARTKERNELS_ISA)

#include "conv2d.h"
#include "conv2d_few_channels.h"
#include "embedding.h"
#include "entries.h"
#include "linear.h"
#include "optimizers.h"
#include "random_map.h"
#include "subnetwork_weight.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

template <class T>
constexpr OperatorsOn<T> kOperatorsOn = {
#define PARTKERNELS_KERNEL_OF(name) .name = name<T>,
    PARTKERNELS_OPERATORS(PARTKERNELS_KERNEL_OF)
#undef PARTKERNELS_KERNEL_OF
};

constexpr Operators kOperators = {kOperatorsOn<float>, kOperatorsOn<double>, kOperatorsOn<bfloat16>, random_map,
                                  count_entries};

}  // namespace partkernels::cpu::PARTKERNELS_ISA

#endif
