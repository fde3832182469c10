// Functions of the CPU library for Python besides the operators, with their schemas.
#include "backend.h"

namespace partkernels::binding {
namespace {

void random_map(Tensor map, int64_t cols, Sizes sizes, int64_t seed) {
  cpu::random_map(map.size(0), cols, sizes, static_cast<uint64_t>(seed), data<uint8_t>(map),
                  threads_for_entries(map.size(0) * cols));
}

std::string instruction_set() { return cpu::instruction_set(); }

// One line for each set: its name, a colon, and the features that the processor lacks.
std::string instruction_sets() {
  std::string lines;
  for (const auto& [name, lacking] : cpu::instruction_sets()) {
    lines += (lines.empty() ? "" : "\n") + name + ":" + lacking;
  }
  return lines;
}

STABLE_TORCH_LIBRARY_FRAGMENT(partkernels_cpu, m) {
  m.def("random_map(Tensor(a!) map, int cols, int[] sizes, int seed) -> ()");
  m.def("instruction_set() -> str");
  m.def("instruction_sets() -> str");
}

PARTKERNELS_KERNELS(m) { m.impl("random_map", TORCH_BOX(&random_map)); }

STABLE_TORCH_LIBRARY_IMPL(partkernels_cpu, CompositeExplicitAutograd, m) {
  m.impl("instruction_set", TORCH_BOX(&instruction_set));
  m.impl("instruction_sets", TORCH_BOX(&instruction_sets));
}

}  // namespace
}  // namespace partkernels::binding
