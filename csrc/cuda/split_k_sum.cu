// Split-K: adds up the sums that blocks share, in a pass over [shares, down, across] in float32.
#include "matmul_kernels.h"
#include "weight_layout.h"

namespace partkernels::cuda {

namespace {

constexpr int kThreads = 128;

template <class T>
PARTKERNELS_KERNEL PARTKERNELS_BOUNDS(kThreads, 1) void add_up(PARTKERNELS_ARGUMENT Product<T> p) {
  const int64_t i = int64_t{block_index()} * kThreads + thread_index(), size = int64_t{p.down} * p.across;
  if (i >= size) return;
  float sum = 0;
  for (int share = 0; share < p.shares; ++share) sum += p.partial[share * size + i];
  store_result(p, static_cast<int>(i / p.across), static_cast<int>(i % p.across), sum);
}

}  // namespace

template <class T>
Status add_shares(const Product<T>& p, Stream stream) {
  const int64_t blocks = blocks_of(int64_t{p.down} * p.across, kThreads);
  return launch(add_up<T>, {static_cast<int>(blocks), kThreads}, stream, p);
}

template Status add_shares(const Product<bfloat16>&, Stream);
template Status add_shares(const Product<float16>&, Stream);

}  // namespace partkernels::cuda
