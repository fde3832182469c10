// The entries of one partition as a vector, and back.
#include "backend.h"
#include "checks.h"

namespace partkernels::binding {
namespace {

// The entries of a weight that one partition owns.
struct Owned {
  Owners owners;
  int partition;
  std::vector<int64_t> starts;  // offset of each row's entries in the vector, then its length

  Owned(const Tensor& weight, int64_t partition, const Tensor& map, int64_t count)
      : owners(owners_of(map, count, sizes_of(weight), weight)), partition(static_cast<int>(partition)) {
    check_live(partition, partition, count);
    const int64_t rows = weight.size(0);
    starts.resize(rows + 1);
    if (weight.numel() == 0) return;
    cpu::count_entries(rows, weight.numel() / rows, owners, this->partition, starts.data(),
                       threads_for_entries(weight.numel()));
  }
};

Tensor gather_entries(Tensor weight, int64_t partition, Tensor map, int64_t count) {
  const Owned owned(weight, partition, map, count);
  const Tensor out = empty({owned.starts.back()}, weight);
  if (out.numel() == 0) return out;
  const Tensor from = of_4_dimensions(weight);
  with_type(weight.scalar_type(), [&]<class T>(T) {
    cpu::gather_entries(weight_of<const T>(from), owned.owners, owned.partition, owned.starts.data(), data<T>(out),
                        threads_for_entries(weight.numel()));
  });
  return out;
}

void scatter_entries(Tensor weight, Tensor values, int64_t partition, Tensor map, int64_t count) {
  const Owned owned(weight, partition, map, count);
  STD_TORCH_CHECK(values.dim() == 1 && values.numel() == owned.starts.back() && alike(values, weight), "values have ",
                  values.numel(), " numbers; expected ", owned.starts.back(),
                  " of the weight's dtype, in one dimension");
  if (values.numel() == 0) return;
  const Tensor from = dense(values), to = of_4_dimensions(weight);
  with_type(weight.scalar_type(), [&]<class T>(T) {
    cpu::scatter_entries(data<const T>(from), owned.starts.data(), owned.owners, owned.partition, weight_of<T>(to),
                         threads_for_entries(weight.numel()));
  });
  write_back(weight, to);
}

PARTKERNELS_KERNELS(m) {
  m.impl("gather_entries", TORCH_BOX(&gather_entries));
  m.impl("scatter_entries", TORCH_BOX(&scatter_entries));
}

}  // namespace
}  // namespace partkernels::binding
