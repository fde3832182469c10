#include "hopper_gradients.h"

namespace partkernels::cuda {

namespace {

template <class Kernel, class T>
Status launch_tiles(void (*kernel)(HopperProduct<T>), const Device& device, const HopperProduct<T>& p, int stage_bytes,
                    Stream stream) {
  const int tiles = divide_up(p.product.down, Kernel::kDown) * divide_up(p.product.across, Kernel::kAcross);
  const int shared = kFixedBytes + p.product.stages * stage_bytes;
  return launch(kernel, {min_of(tiles, device.multiprocessors), kHopperThreads, shared}, stream, p);
}

}  // namespace

template <class T>
Status run_hopper_grad_input(const Device& device, const Subnetwork<T>& w, const Product<T>& product, Stream stream) {
  return with_kind(w, [&](auto kind) -> Status {
    constexpr DefaultKind kKind = decltype(kind)::value;
    using Kernel = HopperGradInputKernel<T, kKind>;
    HopperProduct<T> p{.product = product};
    const Rebuilt<T>& of = p.product.weight;
    const int stage_bytes = Kernel::stage_bytes(of.bits);
    if (!plan_stages(device, stage_bytes, &p.product)) return run_mma<T, Work::grad_input>(device, w, product, stream);
    Status status = make_map(product.left, Kernel::kDown, &p.left);
    if (status) status = make_map(of.weight, kGroup, &p.right);
    if (status && kKind == DefaultKind::stored) status = make_map(of.stored, kGroup, &p.stored);
    if (status) status = make_map(of, kGroup, Kernel::kAcross, &p.map);
    if (!status) return status;
    return launch_tiles<Kernel>(hopper_grad_input<T, kKind>, device, p, stage_bytes, stream);
  });
}

template <class T>
Status run_hopper_grad_weight(const Device& device, const Product<T>& product, Stream stream) {
  using Kernel = HopperGradWeightKernel<T>;
  HopperProduct<T> p{.product = product};
  plan_stages(device, Kernel::kStageBytes, &p.product);
  Status status = make_map(product.left, kGroup, &p.left);
  if (status) status = make_map(product.right, kGroup, &p.right);
  if (!status) return status;
  return launch_tiles<Kernel>(hopper_grad_weight<T>, device, p, Kernel::kStageBytes, stream);
}

#define PARTKERNELS_INSTANTIATE(T)                                                                       \
  template Status run_hopper_grad_input(const Device&, const Subnetwork<T>&, const Product<T>&, Stream); \
  template Status run_hopper_grad_weight(const Device&, const Product<T>&, Stream);
PARTKERNELS_INSTANTIATE(bfloat16)
PARTKERNELS_INSTANTIATE(float16)

}  // namespace partkernels::cuda
