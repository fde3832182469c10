// The gradient of linear's x on compute capability 9.0: grad_x = grad_y w.
//
// A block makes tiles of 256 rows of grad_y by 128 columns of the weight, whose tile is rebuilt in shared memory by all
// that multiply, while the tensor cores multiply the one before.
#pragma once

#include "hopper_pipeline.h"

namespace partkernels::cuda {

// A box of 64 rows of 64 columns, whose columns are not what is added over.
constexpr int kBlock = 64 * 64 * 2;
constexpr int kTermSteps = kGroup / 16;
// From one product's 16 terms to the next.
constexpr int kTermBytes = 16 * 128;

// Stores a warp's sums of 16 rows and 64 columns, which begin at (row, col) of the result: by way of the warp's own
// shared memory, so that each row is written by neighbouring threads.
template <class T>
PARTKERNELS_DEVICE void store_rows(const Product<T>& p, const float* sums, int row, int col, char* turned) {
  const int lane = thread_index() % kWarp;
  const SharedAddress to = shared_address(turned);
  // [16][64]; the eight parts of a row change places, so that those of eight rows lie in different banks.
  using Turned = Tile<16, 64>;
  PARTKERNELS_UNROLL
  for (int j = 0; j < 8; j += 2) {
    uint32_t words[4];
    PARTKERNELS_UNROLL
    for (int e = 0; e < 4; ++e) {
      const float* const two = sums + 4 * (j + e / 2) + 2 * (e % 2);
      words[e] = pair_of<T>(two[0], two[1]);
    }
    store_matrices(to + Turned::offset(lane % 16, j + lane / 16), words);
  }
  synchronize_warp();
  PARTKERNELS_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int r = 4 * i + lane / 8, part = lane % 8;
    uint32_t words[4];
    load_words(reinterpret_cast<const uint32_t*>(turned + Turned::offset(r, part)), words);
    if (row + r < p.down && col + 8 * part < p.across) {
      store_words(reinterpret_cast<uint32_t*>(p.out + (row + r) * p.row_stride + col + 8 * part), words);
    }
  }
  synchronize_warp();
}

// Stores the same sums as a share of them, in float32.
template <class T>
PARTKERNELS_DEVICE void store_share(const Product<T>& p, const float* sums, int share, int row, int col) {
  const int lane = thread_index() % kWarp;
  PARTKERNELS_UNROLL
  for (int i = 0; i < 32; ++i) {
    const int r = row + lane / 4 + i % 4 / 2 * 8, c = col + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    if (r < p.down && c < p.across) partial_row(p, share, r)[c] = sums[i];
  }
}

template <class T, DefaultKind kKind>
struct HopperGradInputKernel {
  static constexpr int kDown = 256, kAcross = 128, kBlocks = kAcross / 64;
  static constexpr bool kStored = kKind == DefaultKind::stored;
  static constexpr int kLeft = kDown * 128, kRight = kBlocks * kBlock;
  static constexpr int kStored0 = kLeft + kRight, kMap = kStored0 + (kStored ? kRight : 0);

  static PARTKERNELS_FUNCTION int stage_bytes(int bits) { return kMap + kGroup * map_bytes(kAcross, bits); }
};

template <class T, DefaultKind kKind>
PARTKERNELS_KERNEL PARTKERNELS_BOUNDS(kHopperThreads,
                                      1) void hopper_grad_input(PARTKERNELS_ARGUMENT HopperProduct<T> maps) {
  using Kernel = HopperGradInputKernel<T, kKind>;
  const Product<T>& p = maps.product;
  char* const memory = shared_memory();
  const int stage_bytes = Kernel::stage_bytes(p.weight.bits);
  const HopperPipeline pipeline = hopper_pipeline(p.stages, stage_bytes);
  synchronize_block();

  const int tiles_down = divide_up(p.down, Kernel::kDown), tiles_across = divide_up(p.across, Kernel::kAcross);
  if (thread_index() < kWarpgroup) {
    pipeline.fill(p, tiles_down, tiles_across,
                  [&](SharedAddress left, SharedAddress full, const Task& task, int group) {
                    const int k0 = task.col * Kernel::kAcross;
                    arrive_and_expect(full, stage_bytes);
                    load_box(left, maps.left, group * kGroup, task.row * Kernel::kDown, full);
                    for (int b = 0; b < Kernel::kBlocks; ++b) {
                      load_box(left + Kernel::kLeft + b * kBlock, maps.weight, k0 + 64 * b, group * kGroup, full);
                      if constexpr (Kernel::kStored) {
                        load_box(left + Kernel::kStored0 + b * kBlock, maps.stored, k0 + 64 * b, group * kGroup, full);
                      }
                    }
                    load_box(left + Kernel::kMap, maps.map, k0 * p.weight.bits / 8, group * kGroup, full);
                  });
  } else {
    take_registers<240>();
    Turn turn;
    const int thread = thread_index() - kWarpgroup, warp = thread / kWarp;
    // Two products of 64 rows for each warpgroup.
    const int first_row = thread / kWarpgroup * 128;
    float d[2][Kernel::kAcross / 2];

    const auto obtain = [&](int group, int k0) {
      wait(pipeline.full(turn.stage), turn.parity);
      char* const stage = memory + turn.stage * stage_bytes;
      PARTKERNELS_UNROLL
      for (int b = 0; b < Kernel::kBlocks; ++b) {
        const int pitch = map_bytes(Kernel::kAcross, p.weight.bits);
        rebuild_tile<T, kKind, kGroup, kGroup, true>(
            stage + Kernel::kLeft + b * kBlock, stage + Kernel::kStored0 + b * kBlock,
            reinterpret_cast<const uint8_t*>(stage + Kernel::kMap) + 8 * b * p.weight.bits, pitch, p.weight,
            group * kGroup, k0 + 64 * b, Crew<kMultipliers>{thread});
      }
      publish_writes();
      synchronize_some(1, kMultipliers);
      turn.advance(p.stages);
    };
    const auto multiply = [&](bool is_first) {
      const SharedAddress left = pipeline.stage(turn.before(1, p.stages)), right = left + Kernel::kLeft;
      begin_products();
      PARTKERNELS_UNROLL
      for (int s = 0; s < kTermSteps; ++s) {
        PARTKERNELS_UNROLL
        for (int i = 0; i < 2; ++i) {
          Products<T, Kernel::kAcross>::template add<0, 1>(d[i], operand(left + (first_row + 64 * i) * 128 + 32 * s),
                                                           operand(right + s * kTermBytes, 1024, kBlock),
                                                           !is_first || s > 0);
        }
      }
      commit_products();
    };
    each_task(p, tiles_down, tiles_across, [&](const Task& task) {
      const int m0 = task.row * Kernel::kDown, k0 = task.col * Kernel::kAcross;
      obtain(task.first, k0);
      for (int i = task.first; i < task.last; ++i) {
        multiply(i == task.first);
        wait_for_products<1>();
        if (i > task.first) pipeline.release(turn, 2);
        if (i + 1 < task.last) obtain(i + 1, k0);
      }
      wait_for_products<0>();
      pipeline.release(turn, 1);
      char* const turned = memory + p.stages * stage_bytes + warp * kTurned;
      PARTKERNELS_UNROLL
      for (int i = 0; i < 2; ++i) {
        PARTKERNELS_UNROLL
        for (int chunk = 0; chunk < Kernel::kAcross / 64; ++chunk) {
          const int row = m0 + first_row + 64 * i + warp % 4 * 16, col = k0 + 64 * chunk;
          if (p.shares > 1) {
            store_share(p, d[i] + 32 * chunk, task.share, row, col);
          } else {
            store_rows(p, d[i] + 32 * chunk, row, col, turned);
          }
        }
      }
    });
  }
}

}  // namespace partkernels::cuda
