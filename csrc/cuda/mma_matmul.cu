#include "matmul_kernels.h"
#include "mma_matmul.h"

namespace partkernels::cuda {

namespace {

template <class T, Work kWork, DefaultKind kKind, int kAcross, bool kAligned>
Status run(const Device& device, Product<T> p, Stream stream) {
  using Kernel = MmaKernel<T, kWork, kKind, kAcross, kAligned>;
  const int tiles = divide_up(p.down, Kernel::kDown) * divide_up(p.across, kAcross);
  const int bytes = Kernel::stage_bytes(p.weight.bits);
  p.stages = 3 * bytes <= device.shared_memory ? 3 : 2;
  return launch_shared(device, p, tiles, stream, [&](const Product<T>& product, int tasks) {
    const Launch how{tasks, Kernel::kThreads, product.stages * bytes};
    return launch(mma_product<T, kWork, kKind, kAcross, kAligned>, how, stream, product);
  });
}

template <class T, Work kWork, DefaultKind kKind>
Status run(const Device& device, const Product<T>& p, bool is_aligned, Stream stream) {
  if (!is_aligned) return run<T, kWork, kKind, 64, false>(device, p, stream);
  using Wide = MmaKernel<T, kWork, kKind, 128, true>;
  const bool fits = 3 * Wide::stage_bytes(p.weight.bits) <= device.shared_memory;
  const int tiles = divide_up(p.down, Wide::kDown) * divide_up(p.across, 128);
  // Fewer tiles would leave multiprocessors without work.
  if (!fits || tiles < device.multiprocessors) return run<T, kWork, kKind, 64, true>(device, p, stream);
  return run<T, kWork, kKind, 128, true>(device, p, stream);
}

}  // namespace

template <class T, Work kWork>
Status run_mma(const Device& device, const Subnetwork<T>& w, const Product<T>& p, Stream stream) {
  return with_kind(w, [&](auto kind) {
    constexpr DefaultKind kKind = decltype(kind)::value;
    const bool aligned = rows_fit_copies(p.left) && rows_fit_copies(p.weight.weight) &&
                         (kKind != DefaultKind::stored || rows_fit_copies(p.weight.stored));
    return run<T, kWork, kKind>(device, p, aligned, stream);
  });
}

#define PARTKERNELS_INSTANTIATE(T)                                                                           \
  template Status run_mma<T, Work::forward>(const Device&, const Subnetwork<T>&, const Product<T>&, Stream); \
  template Status run_mma<T, Work::grad_input>(const Device&, const Subnetwork<T>&, const Product<T>&, Stream);
PARTKERNELS_INSTANTIATE(bfloat16)
PARTKERNELS_INSTANTIATE(float16)

}  // namespace partkernels::cuda
