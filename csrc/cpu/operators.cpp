// The public functions, which call those of an instruction set: the best one that the processor supports, or the one
// that PARTKERNELS_CPU_ISA names.
#include "operators.h"

#include <cstdlib>
#include <span>
#include <stdexcept>
#include <string>

#if defined(PARTKERNELS_X86_TARGETS)
#include "amx.h"
#elif defined(PARTKERNELS_ARM_TARGETS)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace partkernels::cpu {
namespace {

struct Feature {
  const char* name;
  bool (*is_here)();
};

struct InstructionSet {
  const char* name;
  const Operators& (*operators)();
  std::span<const Feature> needs;
  // Called if the processor has all of these features: the reason why the set still cannot be used, or an empty string.
  const char* (*problem)() = nullptr;
};

#if defined(PARTKERNELS_X86_TARGETS)
#define PARTKERNELS_FEATURE(name) {name, [] { return __builtin_cpu_supports(name) != 0; }}
constexpr Feature kFeatures[] = {
    PARTKERNELS_FEATURE("avx2"),       PARTKERNELS_FEATURE("fma"),        PARTKERNELS_FEATURE("avx512f"),
    PARTKERNELS_FEATURE("avx512bw"),   PARTKERNELS_FEATURE("avx512dq"),   PARTKERNELS_FEATURE("avx512vl"),
    PARTKERNELS_FEATURE("avx512vbmi"), PARTKERNELS_FEATURE("avx512bf16"), {"amx-tile", amx::has_tiles},
    {"amx-bf16", amx::has_products},
};
#undef PARTKERNELS_FEATURE
constexpr auto first_features(size_t n) { return std::span(kFeatures).first(n); }

// Computed once. A trial product is checked before AMX is used: a system that permits tiles may still emulate them
// wrongly.
const char* problem_of_amx() {
  static const char* const problem = !amx::is_permitted()               ? "amx-tile (the system does not permit it)"
                                     : !avx512_amx_multiplies_rightly() ? "amx-bf16 (a trial product was wrong)"
                                                                        : "";
  return problem;
}
#elif defined(PARTKERNELS_ARM_TARGETS)
constexpr Feature kFeatures[] = {{"bf16", [] { return (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0; }}};
#endif

// The best one first; each set needs a part of the features of the one before.
constexpr InstructionSet kInstructionSets[] = {
#if defined(PARTKERNELS_X86_TARGETS)
    {"avx512_amx", avx512_amx_operators, first_features(10), problem_of_amx},
    {"avx512_bf16", avx512_bf16_operators, first_features(8)},
    {"avx512", avx512_operators, first_features(6)},
    {"avx2", avx2_operators, first_features(2)},
#elif defined(PARTKERNELS_ARM_TARGETS)
    {"neon_bf16", neon_bf16_operators, kFeatures},
#endif
    {"portable", portable_operators, {}},
};

// The features that this processor lacks for a set, separated by commas.
std::string lacking(const InstructionSet& set) {
  std::string names;
  for (const Feature& feature : set.needs) {
    if (!feature.is_here()) names += std::string(names.empty() ? "" : ", ") + feature.name;
  }
  return names.empty() && set.problem ? set.problem() : names;
}

const InstructionSet& choose() {
  const char* const asked = std::getenv("PARTKERNELS_CPU_ISA");
  const bool takes_any = asked == nullptr || *asked == '\0';
  for (const InstructionSet& set : kInstructionSets) {  // sets that were not asked for are not checked
    if ((takes_any || set.name == std::string(asked)) && lacking(set).empty()) return set;
  }
  std::string here;
  bool is_known = false;
  for (const InstructionSet& set : kInstructionSets) {
    is_known = is_known || set.name == std::string(asked);
    if (lacking(set).empty()) here += std::string(here.empty() ? "" : ", ") + set.name;
  }
  throw std::runtime_error("PARTKERNELS_CPU_ISA='" + std::string(asked) +
                           (is_known ? "' cannot run on this processor" : "' is not an instruction set") +
                           "; unset it, or set it to one of " + here + ".");
}

const InstructionSet& chosen() {
  static const InstructionSet& set = choose();
  return set;
}

template <class T>
const OperatorsOn<T>& operators() {
  static const Operators& all = chosen().operators();
  if constexpr (std::is_same_v<T, float>) {
    return all.on_float;
  } else if constexpr (std::is_same_v<T, double>) {
    return all.on_double;
  } else {
    return all.on_bfloat16;
  }
}

}  // namespace

const char* instruction_set() { return chosen().name; }

std::vector<Candidate> instruction_sets() {
  std::vector<Candidate> all;
  for (const InstructionSet& set : kInstructionSets) all.push_back({set.name, lacking(set)});
  return all;
}

template <class T>
void linear(Matrix<const T> x, const Subnetwork<T>& w, const T* bias, Matrix<T> y, const ParallelFor& parallel_for) {
  operators<T>().linear(x, w, bias, y, parallel_for);
}

template <class T>
void linear_grad_input(Matrix<const T> grad_y, const Subnetwork<T>& w, Matrix<T> grad_x,
                       const ParallelFor& parallel_for) {
  operators<T>().linear_grad_input(grad_y, w, grad_x, parallel_for);
}

template <class T>
void linear_grad_weight(Matrix<const T> grad_y, Matrix<const T> x, Owners owners, int update, Weight<T> grad_w,
                        const ParallelFor& parallel_for) {
  operators<T>().linear_grad_weight(grad_y, x, owners, update, grad_w, parallel_for);
}

template <class T>
void conv2d(Images<const T> x, const Subnetwork<T>& w, const T* bias, Convolution conv, Images<T> y,
            const ParallelFor& parallel_for) {
  operators<T>().conv2d(x, w, bias, conv, y, parallel_for);
}

template <class T>
void conv2d_grad_input(Images<const T> grad_y, const Subnetwork<T>& w, Convolution conv, Images<T> grad_x,
                       const ParallelFor& parallel_for) {
  operators<T>().conv2d_grad_input(grad_y, w, conv, grad_x, parallel_for);
}

template <class T>
void few_channels_grad_input(Images<const T> grad_y, Weight<const T> w, Convolution conv, Images<T> grad_x,
                             const ParallelFor& parallel_for) {
  operators<T>().few_channels_grad_input(grad_y, w, conv, grad_x, parallel_for);
}

template <class T>
void conv2d_grad_weight(Images<const T> grad_y, Images<const T> x, Convolution conv, Owners owners, int update,
                        Weight<T> grad_w, const ParallelFor& parallel_for) {
  operators<T>().conv2d_grad_weight(grad_y, x, conv, owners, update, grad_w, parallel_for);
}

template <class T>
void subnetwork_weight(const Subnetwork<T>& w, int64_t first_row, int64_t first_in, Weight<T> out,
                       const ParallelFor& parallel_for) {
  operators<T>().subnetwork_weight(w, first_row, first_in, out, parallel_for);
}

template <class T>
void subnetwork_weight_grad(Weight<const T> grad, Owners owners, int first, int last, Weight<T> out,
                            const ParallelFor& parallel_for) {
  operators<T>().subnetwork_weight_grad(grad, owners, first, last, out, parallel_for);
}

template <class T>
void embedding(const int64_t* ids, int64_t count, const Subnetwork<T>& w, T* out, const ParallelFor& parallel_for) {
  operators<T>().embedding(ids, count, w, out, parallel_for);
}

template <class T>
void gather_entries(Weight<const T> w, const Owners& owners, int partition, const int64_t* starts, T* out,
                    const ParallelFor& parallel_for) {
  operators<T>().gather_entries(w, owners, partition, starts, out, parallel_for);
}

template <class T>
void scatter_entries(const T* values, const int64_t* starts, const Owners& owners, int partition, Weight<T> w,
                     const ParallelFor& parallel_for) {
  operators<T>().scatter_entries(values, starts, owners, partition, w, parallel_for);
}

template <class T>
void sgd_step(Weight<T> parameter, Weight<const T> grad, Weight<T> momentum_buffer, const Owners& owners, int update,
              const Sgd& sgd, const ParallelFor& parallel_for) {
  operators<T>().sgd_step(parameter, grad, momentum_buffer, owners, update, sgd, parallel_for);
}

template <class T>
void adam_step(Weight<T> parameter, Weight<const T> grad, Weight<T> exp_avg, Weight<T> exp_avg_sq, const Owners& owners,
               int update, const Adam& adam, const ParallelFor& parallel_for) {
  operators<T>().adam_step(parameter, grad, exp_avg, exp_avg_sq, owners, update, adam, parallel_for);
}

void count_entries(int64_t rows, int64_t cols, const Owners& owners, int partition, int64_t* starts,
                   const ParallelFor& parallel_for) {
  chosen().operators().count_entries(rows, cols, owners, partition, starts, parallel_for);
}

void random_map(int64_t rows, int64_t cols, const std::vector<int64_t>& sizes, uint64_t seed, uint8_t* map,
                const ParallelFor& parallel_for) {
  chosen().operators().random_map(rows, cols, sizes, seed, map, parallel_for);
}

#define PARTKERNELS_INSTANTIATE(name)           \
  template decltype(name<float>) name<float>;   \
  template decltype(name<double>) name<double>; \
  template decltype(name<bfloat16>) name<bfloat16>;
PARTKERNELS_OPERATORS(PARTKERNELS_INSTANTIATE)

}  // namespace partkernels::cpu
