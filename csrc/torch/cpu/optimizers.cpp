#include <array>

#include "backend.h"
#include "checks.h"

namespace partkernels::binding {
namespace {

using Tensors = std::vector<Tensor>;
using Maps = std::vector<OptionalTensor>;

// The entries that an optimiser step updates, in tensors of one shape, the parameter first. Without a map these are all
// entries, in one row if every tensor is contiguous.
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

  // Copies the result back into the i-th tensor if its view was a copy.
  void write_back(size_t i) const {
    if (views_[i]) binding::write_back(*tensors_[i], *views_[i]);
  }

 private:
  std::array<const Tensor*, N> tensors_;
  std::array<OptionalTensor, N> views_;
  Owners owners_{};
  bool is_row_;
};

// Checks the arguments of a step of several parameters, before anything changes. All parameters have the same dtype and
// device.
void check_steps(const Tensors& parameters, std::initializer_list<const Tensors*> others, const Maps& maps,
                 const Sizes& counts, int64_t update) {
  const size_t n = parameters.size();
  for (const Tensors* each : others)
    STD_TORCH_CHECK(each->size() == n, "a list of ", each->size(), " tensors for ", n, " parameters");
  STD_TORCH_CHECK(maps.size() == n && counts.size() == n, maps.size(), " maps and ", counts.size(), " counts for ", n,
                  " parameters");
  for (size_t i = 0; i < n; ++i) {
    STD_TORCH_CHECK(
        alike(parameters[i], parameters[0]) && parameters[i].get_device_index() == parameters[0].get_device_index(),
        "parameters differ in dtype or device");
    for (const Tensors* each : others) check_state(parameters[i], {&(*each)[i]});
    if (maps[i]) check_live(update, update, counts[i]);
  }
}

void sgd_steps(Tensors parameters, Tensors grads, Tensors momentum_buffers, Maps maps, Sizes counts, int64_t update,
               double lr, double momentum, double weight_decay, bool nesterov) {
  const bool has_buffers = momentum != 0;
  check_steps(parameters, {&grads, has_buffers ? &momentum_buffers : &grads}, maps, counts, update);
  if (parameters.empty()) return;
  const Sgd sgd{lr, momentum, weight_decay, nesterov};
  std::vector<Stepped<3>> stepped;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Tensor& buffer = has_buffers ? momentum_buffers[i] : grads[i];
    stepped.push_back({maps[i], counts[i], {&parameters[i], &grads[i], &buffer}});
  }
  const Device here(parameters[0]);
  Device::with_type(parameters[0].scalar_type(), [&]<class T>(T) {
    std::vector<SgdTensors<T>> each;
    for (const auto& one : stepped) {
      each.push_back({one.template weight<T>(0), one.template weight<const T>(1),
                      has_buffers ? one.template weight<T>(2) : Weight<T>{}, one.owners()});
    }
    here.sgd_steps(each, static_cast<int>(update), sgd);
  });
  for (const auto& one : stepped) {
    one.write_back(0);
    if (has_buffers) one.write_back(2);
  }
}

void adam_steps(Tensors parameters, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Maps maps, Sizes counts,
                int64_t update, Sizes steps, double lr, double beta1, double beta2, double eps, double weight_decay,
                bool decoupled) {
  check_steps(parameters, {&grads, &exp_avgs, &exp_avg_sqs}, maps, counts, update);
  STD_TORCH_CHECK(steps.size() == parameters.size(), steps.size(), " step counts; expected ", parameters.size());
  if (parameters.empty()) return;
  std::vector<Stepped<4>> stepped;
  for (size_t i = 0; i < parameters.size(); ++i) {
    stepped.push_back({maps[i], counts[i], {&parameters[i], &grads[i], &exp_avgs[i], &exp_avg_sqs[i]}});
  }
  const Device here(parameters[0]);
  Device::with_type(parameters[0].scalar_type(), [&]<class T>(T) {
    std::vector<AdamTensors<T>> each;
    for (size_t i = 0; i < stepped.size(); ++i) {
      const auto& one = stepped[i];
      each.push_back({one.template weight<T>(0), one.template weight<const T>(1), one.template weight<T>(2),
                      one.template weight<T>(3), one.owners(), steps[i]});
    }
    here.adam_steps(each, static_cast<int>(update), Adam{lr, beta1, beta2, eps, weight_decay, decoupled, /*step=*/0});
  });
  for (const auto& one : stepped) {
    for (const size_t written : {0, 2, 3}) one.write_back(written);
  }
}

// Counts a step in each counter, int64 [C], and takes adam_steps with these numbers of steps.
void counted_adam_steps(Tensors parameters, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Maps maps,
                        Sizes counts, int64_t update, Tensors counters, int64_t place, double lr, double beta1,
                        double beta2, double eps, double weight_decay, bool decoupled) {
  Sizes steps;
  for (const Tensor& counter : counters) {
    STD_TORCH_CHECK(counter.scalar_type() == ScalarType::Long && counter.is_cpu() && counter.is_contiguous() &&
                        0 <= place && place < counter.numel(),
                    "a counter is no contiguous int64 vector on the CPU with item ", place);
    steps.push_back(data<const int64_t>(counter)[place] + 1);
  }
  adam_steps(parameters, grads, exp_avgs, exp_avg_sqs, maps, counts, update, steps, lr, beta1, beta2, eps, weight_decay,
             decoupled);
  for (size_t i = 0; i < counters.size(); ++i) data<int64_t>(counters[i])[place] = steps[i];
}

PARTKERNELS_KERNELS(m) {
  m.impl("sgd_steps", TORCH_BOX(&sgd_steps));
  m.impl("adam_steps", TORCH_BOX(&adam_steps));
  m.impl("counted_adam_steps", TORCH_BOX(&counted_adam_steps));
}

}  // namespace
}  // namespace partkernels::binding
