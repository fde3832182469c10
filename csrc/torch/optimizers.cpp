#include <array>

#include "backend.h"
#include "checks.h"

namespace partkernels::binding {
namespace {

using Tensors = std::vector<Tensor>;
using Maps = std::vector<OptionalTensor>;

// What a step of an optimiser meets: the entries of tensors of one shape, the parameter's first. Without a map these
// are all, and where every tensor is dense, one row.
template <size_t N>
class Stepped {
 public:
  Stepped(const OptionalTensor& map, int64_t count, const std::array<const Tensor*, N>& tensors)
      : tensors_(tensors), is_row_(!map) {
    if (map) owners_ = owners_of(*map, count, sizes_of(*tensors[0]), *tensors[0]);
    for (const Tensor* tensor : tensors) is_row_ = is_row_ && tensor->is_contiguous();
    if (is_row_ || tensors[0]->dim() <= 4) return;
    for (size_t i = 0; i < N; ++i) views_[i] = of_4_dimensions(*tensors[i]);
  }

  const Owners& owners() const { return owners_; }

  template <class T>
  Weight<T> weight(size_t i) const {
    const Tensor& tensor = views_[i] ? *views_[i] : *tensors_[i];
    const int64_t entries = tensor.numel();
    return is_row_ ? Weight<T>{data<T>(tensor), 1, entries, 1, 1, entries, 1, 0, 0} : weight_of<T>(tensor);
  }

  // What is written into the i-th tensor, where a view of it was a copy.
  void write_back(size_t i) const {
    if (views_[i]) binding::write_back(*tensors_[i], *views_[i]);
  }

 private:
  std::array<const Tensor*, N> tensors_;
  std::array<OptionalTensor, N> views_;
  Owners owners_{};
  bool is_row_;
};

// All that several parameters share in a step, and of each its own: checked before anything changes.
void check_steps(const Tensors& parameters, std::initializer_list<const Tensors*> others, const Maps& maps,
                 const Sizes& counts, int64_t update) {
  const size_t n = parameters.size();
  for (const Tensors* each : others)
    STD_TORCH_CHECK(each->size() == n, "lists of ", each->size(), " and ", n, " tensors");
  STD_TORCH_CHECK(maps.size() == n && counts.size() == n, maps.size(), " maps and ", counts.size(), " counts of ", n,
                  " parameters");
  for (size_t i = 0; i < n; ++i) {
    for (const Tensors* each : others) check_state(parameters[i], {&(*each)[i]});
    if (maps[i]) check_live(update, update, counts[i]);
  }
}

void sgd_steps(Tensors parameters, Tensors grads, Tensors momentum_buffers, Maps maps, Sizes counts, int64_t update,
               double lr, double momentum, double weight_decay, bool nesterov) {
  const bool has_buffers = momentum != 0;
  check_steps(parameters, {&grads, has_buffers ? &momentum_buffers : &grads}, maps, counts, update);
  const Sgd sgd{lr, momentum, weight_decay, nesterov};
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Device here(parameters[i]);
    const Stepped<3> stepped(maps[i], counts[i],
                             {&parameters[i], &grads[i], has_buffers ? &momentum_buffers[i] : &grads[i]});
    Device::with_type(parameters[i].scalar_type(), [&]<class T>(T) {
      here.pass(kernels::sgd_step<T>, parameters[i].numel(), stepped.template weight<T>(0),
                stepped.template weight<const T>(1), has_buffers ? stepped.template weight<T>(2) : Weight<T>{},
                stepped.owners(), static_cast<int>(update), sgd);
    });
    stepped.write_back(0);
    if (has_buffers) stepped.write_back(2);
  }
}

void adam_steps(Tensors parameters, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Maps maps, Sizes counts,
                int64_t update, Sizes steps, double lr, double beta1, double beta2, double eps, double weight_decay,
                bool decoupled) {
  check_steps(parameters, {&grads, &exp_avgs, &exp_avg_sqs}, maps, counts, update);
  STD_TORCH_CHECK(steps.size() == parameters.size(), steps.size(), " numbers of steps of ", parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Device here(parameters[i]);
    const Stepped<4> stepped(maps[i], counts[i], {&parameters[i], &grads[i], &exp_avgs[i], &exp_avg_sqs[i]});
    Device::with_type(parameters[i].scalar_type(), [&]<class T>(T) {
      here.pass(kernels::adam_step<T>, parameters[i].numel(), stepped.template weight<T>(0),
                stepped.template weight<const T>(1), stepped.template weight<T>(2), stepped.template weight<T>(3),
                stepped.owners(), static_cast<int>(update),
                Adam{lr, beta1, beta2, eps, weight_decay, decoupled, steps[i]});
    });
    for (const size_t written : {0, 2, 3}) stepped.write_back(written);
  }
}

PARTKERNELS_KERNELS(m) {
  m.impl("sgd_steps", TORCH_BOX(&sgd_steps));
  m.impl("adam_steps", TORCH_BOX(&adam_steps));
}

}  // namespace
}  // namespace partkernels::binding
