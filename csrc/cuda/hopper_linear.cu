#include "hopper_linear.h"
#include "matmul_kernels.h"

namespace partkernels::cuda {

namespace {

template <class T, DefaultKind kKind, int kAcross>
Status run(const Device& device, HopperProduct<T> p, Stream stream) {
  using Kernel = HopperLinearKernel<T, kKind, kAcross>;
  Product<T>& of = p.product;
  const Rebuilt<T>& w = of.weight;
  const int stage_bytes = Kernel::stage_bytes(w.bits);
  const bool fits = plan_stages(device, stage_bytes, &of);
  if constexpr (kAcross > 64) {
    if (!fits) return run<T, kKind, kAcross / 2>(device, p, stream);
  }
  Status status = make_map(of.left, kAcross, &p.left);
  if (status) status = make_map(w.weight, Kernel::kDown, &p.weight);
  if (status && kKind == DefaultKind::stored) status = make_map(w.stored, Kernel::kDown, &p.stored);
  if (status) status = make_map(w, Kernel::kDown, kGroup, &p.map);
  if (!status) return status;
  const int tiles = divide_up(of.across, Kernel::kDown) * divide_up(of.down, kAcross);
  return launch_hopper(hopper_linear<T, kKind, kAcross>, device, p, tiles, stage_bytes, stream);
}

}  // namespace

template <class T>
Status run_hopper_linear(const Device& device, const Subnetwork<T>& w, const Product<T>& product, Stream stream) {
  const HopperProduct<T> p{.product = product};
  return with_kind(w, [&](auto kind) {
    constexpr DefaultKind kKind = decltype(kind)::value;
    // With normal defaults, wider tiles would need too many registers.
    constexpr int kWidest = kKind == DefaultKind::normal ? 128 : 256;
    const int rows = product.down;
    if (rows <= 64) return run<T, kKind, 64>(device, p, stream);
    if (rows <= 128) return run<T, kKind, 128>(device, p, stream);
    return run<T, kKind, kWidest>(device, p, stream);
  });
}

template Status run_hopper_linear(const Device&, const Subnetwork<bfloat16>&, const Product<bfloat16>&, Stream);
template Status run_hopper_linear(const Device&, const Subnetwork<float16>&, const Product<float16>&, Stream);

}  // namespace partkernels::cuda
