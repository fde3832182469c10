#include "backend.h"
#include "checks.h"

namespace partkernels::binding {
namespace {

// The entries that a step of an optimiser meets, of the parameter, which comes first. Without a map these are all, and
// where every tensor is dense, one row.
class Stepped {
 public:
  Stepped(const OptionalTensor& map, int64_t count, std::initializer_list<const Tensor*> tensors)
      : owners_(map ? owners_of(*map, count, sizes_of(**tensors.begin()), **tensors.begin()) : Owners{}),
        one_row_(!map) {
    for (const Tensor* tensor : tensors) one_row_ = one_row_ && (tensor == nullptr || tensor->is_contiguous());
  }

  const Owners& owners() const { return owners_; }

  Tensor view(const Tensor& tensor) const {
    return one_row_ ? borrowed(tensor.data_ptr(), {1, tensor.numel()}, {tensor.numel(), 1}, tensor)
                    : of_4_dimensions(tensor);
  }

 private:
  Owners owners_;
  bool one_row_;
};

void sgd_step(Tensor parameter, Tensor grad, OptionalTensor momentum_buffer, OptionalTensor map, int64_t count,
              int64_t update, double lr, double momentum, double weight_decay, bool nesterov) {
  STD_TORCH_CHECK(momentum == 0 || momentum_buffer, "momentum ", momentum, " without a momentum_buffer");
  check_state(parameter, {&grad, momentum_buffer ? &*momentum_buffer : nullptr});
  check_live(update, update, count);
  const Device here(parameter);
  const Stepped stepped(map, count, {&parameter, &grad, momentum_buffer ? &*momentum_buffer : nullptr});
  const Tensor w = stepped.view(parameter), g = stepped.view(grad);
  const OptionalTensor buffer = momentum_buffer ? OptionalTensor(stepped.view(*momentum_buffer)) : std::nullopt;
  Device::with_type(parameter.scalar_type(), [&]<class T>(T) {
    here.pass(kernels::sgd_step<T>, parameter.numel(), weight_of<T>(w), weight_of<const T>(g),
              buffer ? weight_of<T>(*buffer) : Weight<T>{}, stepped.owners(), static_cast<int>(update),
              Sgd{lr, momentum, weight_decay, nesterov});
  });
  write_back(parameter, w);
  if (buffer) write_back(*momentum_buffer, *buffer);
}

void adam_step(Tensor parameter, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, OptionalTensor map, int64_t count,
               int64_t update, int64_t step, double lr, double beta1, double beta2, double eps, double weight_decay,
               bool decoupled) {
  check_state(parameter, {&grad, &exp_avg, &exp_avg_sq});
  check_live(update, update, count);
  const Device here(parameter);
  const Stepped stepped(map, count, {&parameter, &grad, &exp_avg, &exp_avg_sq});
  const Tensor w = stepped.view(parameter), g = stepped.view(grad);
  const Tensor m = stepped.view(exp_avg), v = stepped.view(exp_avg_sq);
  Device::with_type(parameter.scalar_type(), [&]<class T>(T) {
    here.pass(kernels::adam_step<T>, parameter.numel(), weight_of<T>(w), weight_of<const T>(g), weight_of<T>(m),
              weight_of<T>(v), stepped.owners(), static_cast<int>(update),
              Adam{lr, beta1, beta2, eps, weight_decay, decoupled, step});
  });
  write_back(parameter, w);
  write_back(exp_avg, m);
  write_back(exp_avg_sq, v);
}

PARTKERNELS_KERNELS(m) {
  m.impl("sgd_step", TORCH_BOX(&sgd_step));
  m.impl("adam_step", TORCH_BOX(&adam_step));
}

}  // namespace
}  // namespace partkernels::binding
