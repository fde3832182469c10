#include "hopper_grad_input.h"

namespace partkernels::cuda {

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
    if (status) status = make_map(of.weight, kGroup, &p.weight);
    if (status && kKind == DefaultKind::stored) status = make_map(of.stored, kGroup, &p.stored);
    if (status) status = make_map(of, kGroup, Kernel::kAcross, &p.map);
    if (!status) return status;
    const int tiles = divide_up(product.down, Kernel::kDown) * divide_up(product.across, Kernel::kAcross);
    return launch_hopper(hopper_grad_input<T, kKind>, device, p, tiles, stage_bytes, stream);
  });
}

template Status run_hopper_grad_input(const Device&, const Subnetwork<bfloat16>&, const Product<bfloat16>&, Stream);
template Status run_hopper_grad_input(const Device&, const Subnetwork<float16>&, const Product<float16>&, Stream);

}  // namespace partkernels::cuda
