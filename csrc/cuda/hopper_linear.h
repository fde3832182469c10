// linear on compute capability 9.0: y^T = W x^T, with the rebuilt W as the tensor cores' operand in registers.
//
// A block computes tiles of 128 rows of the weight by kAcross rows of x, one after another. One warp fetches x, the
// weight and the map with the copy engine, several groups of 64 columns ahead. Two warpgroups of 64 rows each rebuild
// one group in registers while the tensor cores multiply the previous one.
#pragma once

#include "hopper_pipeline.h"

namespace partkernels::cuda {

template <class T, DefaultKind kKind, int kAcross>
struct HopperLinearKernel {
  static constexpr int kDown = 128;
  static constexpr int kRowBytes = kGroup * 2;
  static constexpr int kTileX = kAcross * kRowBytes, kTileW = kDown * kRowBytes;
  static constexpr int kTilesW = kKind == DefaultKind::stored ? 2 : 1;
  static constexpr int kSteps = kGroup / 16;

  static PARTKERNELS_FUNCTION int stage_bytes(int bits) {
    return kTileX + kTilesW * kTileW + kDown * map_bytes(kGroup, bits);
  }
};

template <class T, DefaultKind kKind, int kAcross>
PARTKERNELS_KERNEL PARTKERNELS_BOUNDS(kHopperThreads,
                                      1) void hopper_linear(PARTKERNELS_ARGUMENT HopperProduct<T> maps) {
  const Product<T>& p = maps.product;
  using Kernel = HopperLinearKernel<T, kKind, kAcross>;
  constexpr int kDown = Kernel::kDown, kSteps = Kernel::kSteps;
  constexpr bool kStored = kKind == DefaultKind::stored;
  char* const memory = shared_memory();
  const int stage_bytes = Kernel::stage_bytes(p.weight.bits);
  const HopperPipeline pipeline = hopper_pipeline(p.stages, stage_bytes);
  synchronize_block();

  // Tiles of the transposed result.
  const int tiles_down = divide_up(p.across, kDown), tiles_across = divide_up(p.down, kAcross);
  if (thread_index() < kWarpgroup) {
    pipeline.fill(p, tiles_down, tiles_across, [&](SharedAddress x, SharedAddress full, const Task& task, int group) {
      const SharedAddress w = x + Kernel::kTileX;
      const int n0 = task.row * kDown;
      arrive_and_expect(full, stage_bytes);
      load_box(x, maps.left, group * kGroup, task.col * kAcross, full);
      load_box(w, maps.weight, group * kGroup, n0, full);
      if constexpr (kStored) load_box(w + Kernel::kTileW, maps.stored, group * kGroup, n0, full);
      const int map_col = group * 8 * p.weight.bits / 16 * 16;
      load_box(w + Kernel::kTilesW * Kernel::kTileW, maps.map, map_col, n0, full);
    });
  } else {
    take_registers<240>();
    Turn turn;
    const int thread = thread_index() - kWarpgroup, lane = thread % kWarp, warp = thread / kWarp;
    const int g = lane / kQuad, q = lane % kQuad;
    const int first_row = 16 * warp + g;  // and first_row + 8
    const int loaded_row = 16 * warp + lane % 16;
    const int loaded_part = lane / 16, pitch = map_bytes(kGroup, p.weight.bits);
    float d[kAcross / 2];
    uint32_t fragments[2][kSteps][4];

    const auto matrices = [&](SharedAddress tile, uint32_t (&to)[kSteps][4]) {
      PARTKERNELS_UNROLL
      for (int s = 0; s < kSteps; ++s) {
        load_matrices(tile + loaded_row * Kernel::kRowBytes + 16 * ((2 * s + loaded_part) ^ (loaded_row % 8)), to[s]);
      }
    };
    // Waits for a group and rebuilds its fragments of the subnetwork's weight.
    const auto obtain = [&](int group, int n0, uint32_t (&a)[kSteps][4]) {
      wait(pipeline.full(turn.stage), turn.parity);
      const SharedAddress w = pipeline.stage(turn.stage) + Kernel::kTileX;
      matrices(w, a);
      uint32_t stored[kSteps][4];
      if constexpr (kStored) matrices(w + Kernel::kTileW, stored);
      const uint8_t* const map = reinterpret_cast<const uint8_t*>(memory) + (w - pipeline.base) +
                                 Kernel::kTilesW * Kernel::kTileW + group * 8 * p.weight.bits % 16;
      rebuild_fragments<T, kKind>(map + first_row * pitch, 8 * pitch, p.weight.bits, p.weight.threshold,
                                  p.weight.defaults, n0 + first_row, group, q, stored, a);
      turn.advance(p.stages);
    };
    // Multiplies the most recently obtained group.
    const auto multiply = [&](bool is_first, const uint32_t (&a)[kSteps][4]) {
      const SharedAddress x = pipeline.stage(turn.before(1, p.stages));
      begin_products();
      PARTKERNELS_UNROLL
      for (int s = 0; s < kSteps; ++s) {
        Products<T, kAcross>::add(d, a[s], operand(x + 32 * s), !is_first || s > 0);
      }
      commit_products();
    };

    each_task(p, tiles_down, tiles_across, [&](const Task& task) {
      const int n0 = task.row * kDown, m0 = task.col * kAcross;
      obtain(task.first, n0, fragments[0]);
      for (int i = task.first; i < task.last; i += 2) {
        multiply(i == task.first, fragments[0]);
        wait_for_products<1>();
        if (i > task.first) pipeline.release(turn, 2);
        if (i + 1 == task.last) break;
        obtain(i + 1, n0, fragments[1]);
        multiply(false, fragments[1]);
        wait_for_products<1>();
        pipeline.release(turn, 2);
        if (i + 2 < task.last) obtain(i + 2, n0, fragments[0]);
      }
      wait_for_products<0>();
      pipeline.release(turn, 1);

      const int n_low = n0 + first_row, n_high = n_low + 8;
      if (p.shares > 1) {
        PARTKERNELS_UNROLL
        for (int i = 0; i < kAcross / 2; ++i) {
          const int m = m0 + 8 * (i / 4) + 2 * q + i % 2, n = i % 4 < 2 ? n_low : n_high;
          if (m < p.down && n < p.across) partial_row(p, task.share, m)[n] = d[i];
        }
        return;
      }
      float bias[2] = {0, 0};
      if (p.bias != nullptr) {
        if (n_low < p.across) bias[0] = as_float(p.bias[n_low]);
        if (n_high < p.across) bias[1] = as_float(p.bias[n_high]);
      }
      // [64][16], with the two 16-byte parts of a row swapped in every other group of four rows, so that no two of
      // eight rows share a bank.
      char* const turned = memory + p.stages * stage_bytes + warp * kTurned;
      const SharedAddress turned_row = shared_address(turned) + 32 * (lane % 8 + lane / 16 * 8);
      const int turned_part = lane / 8 % 2;
      PARTKERNELS_UNROLL
      for (int chunk = 0; chunk < kAcross / 64; ++chunk) {
        PARTKERNELS_UNROLL
        for (int j = 0; j < 8; j += 2) {
          uint32_t words[4];
          PARTKERNELS_UNROLL
          for (int e = 0; e < 4; ++e) {
            const float* const two = d + 4 * (8 * chunk + j + e / 2) + 2 * (e % 2);
            words[e] = pair_of<T>(two[0] + bias[e % 2], two[1] + bias[e % 2]);
          }
          store_transposed_matrices(turned_row + 32 * 8 * j + 16 * (turned_part ^ (lane / 4 % 2)), words);
        }
        synchronize_warp();
        PARTKERNELS_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int row = 16 * i + lane / 2, m = m0 + 64 * chunk + row, n = n0 + 16 * warp + 8 * (lane % 2);
          uint32_t words[4];
          load_words(reinterpret_cast<const uint32_t*>(turned + 32 * row + 16 * (lane % 2 ^ (row / 4 % 2))), words);
          if (m < p.down && n < p.across) store_words(reinterpret_cast<uint32_t*>(p.out + m * p.row_stride + n), words);
        }
        synchronize_warp();
      }
    });
  }
}

}  // namespace partkernels::cuda
