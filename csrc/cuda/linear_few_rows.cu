// linear for a small batch (GEMV) at the memory's speed: the weight is read once, and each entry is used at most 16
// times.
//
// A block has kTiles times 16 rows of the weight, and its warps take turns along the columns. Each warp has its own
// groups of 64 columns in flight, rebuilds one in registers and multiplies it. The warps synchronise only at the end,
// where their sums are added in a fixed order.
#include "matmul_kernels.h"
#include "shared_memory_tiles.h"

namespace partkernels::cuda {

namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarp, kSteps = kGroup / 16;
constexpr int kMostStages = 4;

template <class T, DefaultKind kKind, int kTiles>
struct FewRowsKernel {
  static constexpr int kDown = 16 * kTiles;
  using TileW = Tile<kDown, kGroup>;
  using TileX = Tile<kFewRows, kGroup>;
  static constexpr bool kStored = kKind == DefaultKind::stored;
  static constexpr int kX = TileW::kBytes * (kStored ? 2 : 1), kMap = kX + TileX::kBytes;
  static constexpr int kSums = kDown * kFewRows;  // per warp

  static PARTKERNELS_FUNCTION int stage_bytes(int bits) { return kMap + kDown * map_bytes(kGroup, bits); }
};

// kHasOneStage: each group is multiplied once it is loaded, and the next one is loaded after that.
template <class T, DefaultKind kKind, int kTiles, bool kHasOneStage>
PARTKERNELS_KERNEL PARTKERNELS_BOUNDS(kThreads, 1) void few_rows(PARTKERNELS_ARGUMENT Product<T> p) {
  using Kernel = FewRowsKernel<T, kKind, kTiles>;
  using TileW = typename Kernel::TileW;
  using TileX = typename Kernel::TileX;
  const int stage_bytes = Kernel::stage_bytes(p.weight.bits);
  const int lane = thread_index() % kWarp, warp = thread_index() / kWarp;
  const int n0 = block_index() * Kernel::kDown;
  const int groups = divide_up(p.terms, kGroup), turns = divide_up(groups, kWarps);
  char* const own = shared_memory() + warp * p.stages * stage_bytes;
  const auto next = [&](int stage) { return stage + 1 == p.stages ? 0 : stage + 1; };

  const auto load = [&](int turn, int stage) {
    const int group = warp + turn * kWarps;
    if (group < groups) {
      const SharedAddress to = shared_address(own + stage * stage_bytes);
      const int col = group * kGroup;
      copy_tile<T, Kernel::kDown, kGroup>(to, p.weight.weight, n0, col);
      if constexpr (Kernel::kStored) {
        copy_tile<T, Kernel::kDown, kGroup>(to + TileW::kBytes, p.weight.stored, n0, col);
      }
      copy_tile<T, kFewRows, kGroup>(to + Kernel::kX, p.left, 0, col);
      copy_map<T, Kernel::kDown, kGroup>(to + Kernel::kMap, p.weight, n0, col);
    }
    commit_copies();
  };

  const int g = lane / kQuad, q = lane % kQuad, pitch = map_bytes(kGroup, p.weight.bits);
  float sums[kTiles][2][4] = {};
  const auto multiply = [&](int turn, int stage) {
    const int group = warp + turn * kWarps;
    if (group >= groups) return;
    char* const here = own + stage * stage_bytes;
    const SharedAddress w = shared_address(here);
    const auto* const map = reinterpret_cast<const uint8_t*>(here + Kernel::kMap) + group * 8 * p.weight.bits % 16;
    uint32_t x[kSteps][4];
    PARTKERNELS_UNROLL
    for (int s = 0; s < kSteps; ++s) {
      load_matrices(w + Kernel::kX + TileX::offset(lane % 8 + lane / 16 * 8, 2 * s + lane / 8 % 2), x[s]);
    }
    PARTKERNELS_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      uint32_t a[kSteps][4], stored[kSteps][4];
      PARTKERNELS_UNROLL
      for (int s = 0; s < kSteps; ++s) {
        const int at = TileW::offset(16 * tile + lane % 16, 2 * s + lane / 16);
        load_matrices(w + at, a[s]);
        if constexpr (Kernel::kStored) load_matrices(w + TileW::kBytes + at, stored[s]);
      }
      const int row = 16 * tile + g;
      rebuild_fragments<T, kKind>(map + row * pitch, 8 * pitch, p.weight.bits, p.weight.threshold, p.weight.defaults,
                                  n0 + row, group, q, stored, a);
      PARTKERNELS_UNROLL
      for (int s = 0; s < kSteps; ++s) {
        add_product<T>(sums[tile][0], a[s], x[s][0], x[s][1]);
        add_product<T>(sums[tile][1], a[s], x[s][2], x[s][3]);
      }
    }
  };

  for (int turn = 0; turn < p.stages - 1; ++turn) load(turn, turn);
  for (int turn = 0, loaded = p.stages - 1, multiplied = 0; turn < turns; ++turn) {
    if constexpr (kHasOneStage) {
      synchronize_warp();
      load(turn, 0);
    }
    switch (p.stages) {
      case 4:
        wait_for_copies<2>();
        break;
      case 3:
        wait_for_copies<1>();
        break;
      default:
        wait_for_copies<0>();
    }
    synchronize_warp();
    if constexpr (!kHasOneStage) load(turn + p.stages - 1, loaded);
    multiply(turn, multiplied);
    loaded = next(loaded);
    multiplied = next(multiplied);
  }

  wait_for_copies<0>();
  synchronize_block();
  // [warp][row of x][row of the weight]
  auto* const all = reinterpret_cast<float*>(shared_memory());
  PARTKERNELS_UNROLL
  for (int tile = 0; tile < kTiles; ++tile) {
    PARTKERNELS_UNROLL
    for (int e = 0; e < 8; ++e) {
      const int m = e / 4 * 8 + 2 * q + e % 2, n = 16 * tile + g + e / 2 % 2 * 8;
      all[warp * Kernel::kSums + m * Kernel::kDown + n] = sums[tile][e / 4][e % 4];
    }
  }
  synchronize_block();
  for (int i = thread_index(); i < Kernel::kSums; i += kThreads) {
    float sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += all[w * Kernel::kSums + i];
    const int m = i / Kernel::kDown, n = n0 + i % Kernel::kDown;
    if (m < p.down && n < p.across) store_result(p, m, n, sum);
  }
}

template <class T, DefaultKind kKind, int kTiles>
Status run(const Device& device, const Subnetwork<T>& w, Product<T> p, Stream stream) {
  using Kernel = FewRowsKernel<T, kKind, kTiles>;
  const int bytes = kWarps * Kernel::stage_bytes(p.weight.bits);
  p.stages = min_of(device.shared_memory / bytes, kMostStages);
  if constexpr (kTiles > 1) {
    // Fewer blocks would leave multiprocessors idle, and fewer stages the memory.
    if (p.stages < 2 || 10 * divide_up(p.across, Kernel::kDown) < 9 * device.multiprocessors) {
      return run<T, kKind, kTiles / 2>(device, w, p, stream);
    }
  }
  const int shared = max_of(p.stages * bytes, kWarps * Kernel::kSums * static_cast<int>(sizeof(float)));
  const Launch how{divide_up(p.across, Kernel::kDown), kThreads, shared};
  // On GPUs with 99 KB of shared memory, only one stage with stored defaults fits.
  if constexpr (Kernel::kStored && kTiles == 1) {
    if (p.stages == 1) return launch(few_rows<T, kKind, kTiles, true>, how, stream, p);
  }
  return launch(few_rows<T, kKind, kTiles, false>, how, stream, p);
}

}  // namespace

template <class T>
Status run_few_rows(const Device& device, const Subnetwork<T>& w, const Product<T>& p, Stream stream) {
  return with_kind(w, [&](auto kind) { return run<T, decltype(kind)::value, 4>(device, w, p, stream); });
}

template Status run_few_rows(const Device&, const Subnetwork<bfloat16>&, const Product<bfloat16>&, Stream);
template Status run_few_rows(const Device&, const Subnetwork<float16>&, const Product<float16>&, Stream);

}  // namespace partkernels::cuda
