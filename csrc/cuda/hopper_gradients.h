// The gradients of linear on compute capability 9.0: row-major tiles of 128 down for each of two warpgroups, or of 64.
#pragma once

#include "hopper_ring.h"

namespace partkernels::cuda {

// A box of 64 rows of 64 columns, whose columns are not what is added over.
constexpr int kBlock = 64 * 64 * 2;
constexpr int kTermSteps = kGroup / 16;
// From one product's 16 terms to the next.
constexpr int kTermBytes = 16 * 128;

// Stores a warp's sums of 16 rows, in which chunk `chunk` of 64 columns begins at (row, col) of the result: by way of
// the warp's own shared memory, so that each row is written by neighbouring threads. change(row, col, words) may change
// eight entries before.
template <class T, class Change>
PARTKERNELS_DEVICE void store_rows(const Product<T>& p, const float* sums, int row, int col, char* turned,
                                   const Change& change) {
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
      change(row + r, col + 8 * part, words);
      store_words(reinterpret_cast<uint32_t*>(p.out + (row + r) * p.row_stride + col + 8 * part), words);
    }
  }
  synchronize_warp();
}

// grad_x = grad_y w: tiles of 256 rows of grad_y by 128 columns of the weight, whose tile is rebuilt in shared memory
// by all that multiply, while the tensor cores multiply the one before.
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
  const HopperRing ring = hopper_ring(p.stages, stage_bytes);
  synchronize_block();

  const Tiles<> tiles{divide_up(p.down, Kernel::kDown), divide_up(p.across, Kernel::kAcross)};
  const int groups = divide_up(p.terms, kGroup);
  if (thread_index() < kWarpgroup) {
    ring.fill(tiles, groups, [&](SharedAddress left, SharedAddress full, int tile_row, int tile_col, int group) {
      const int k0 = tile_col * Kernel::kAcross;
      arrive_and_expect(full, stage_bytes);
      load_box(left, maps.left, group * kGroup, tile_row * Kernel::kDown, full);
      for (int b = 0; b < Kernel::kBlocks; ++b) {
        load_box(left + Kernel::kLeft + b * kBlock, maps.right, k0 + 64 * b, group * kGroup, full);
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
      wait(ring.full(turn.stage), turn.parity);
      char* const stage = memory + turn.stage * stage_bytes;
      for (int b = 0; b < Kernel::kBlocks; ++b) {
        const int pitch = map_bytes(Kernel::kAcross, p.weight.bits);
        rebuild_tile<T, kKind, kGroup, kGroup>(
            stage + Kernel::kLeft + b * kBlock, stage + Kernel::kStored0 + b * kBlock,
            reinterpret_cast<const uint8_t*>(stage + Kernel::kMap) + 8 * b * p.weight.bits, pitch, p.weight,
            group * kGroup, k0 + 64 * b, Crew{thread, kMultipliers});
      }
      publish_writes();
      synchronize_some(1, kMultipliers);
      turn.advance(p.stages);
    };
    const auto multiply = [&](int group) {
      const SharedAddress left = ring.stage(turn.before(1, p.stages)), right = left + Kernel::kLeft;
      begin_products();
      PARTKERNELS_UNROLL
      for (int s = 0; s < kTermSteps; ++s) {
        PARTKERNELS_UNROLL
        for (int i = 0; i < 2; ++i) {
          Products<T, Kernel::kAcross>::template add<0, 1>(d[i], operand(left + (first_row + 64 * i) * 128 + 32 * s),
                                                           operand(right + s * kTermBytes, 1024, kBlock),
                                                           group > 0 || s > 0);
        }
      }
      commit_products();
    };
    tiles.each([&](int tile_row, int tile_col) {
      const int m0 = tile_row * Kernel::kDown, k0 = tile_col * Kernel::kAcross;
      obtain(0, k0);
      for (int i = 0; i < groups; ++i) {
        multiply(i);
        wait_for_products<1>();
        if (i > 0) ring.release(turn, 2);
        if (i + 1 < groups) obtain(i + 1, k0);
      }
      wait_for_products<0>();
      ring.release(turn, 1);
      char* const turned = memory + p.stages * stage_bytes + warp * kTurned;
      PARTKERNELS_UNROLL
      for (int i = 0; i < 2; ++i) {
        PARTKERNELS_UNROLL
        for (int chunk = 0; chunk < Kernel::kAcross / 64; ++chunk) {
          store_rows(p, d[i] + 32 * chunk, m0 + first_row + 64 * i + warp % 4 * 16, k0 + 64 * chunk, turned,
                     [](int, int, uint32_t (&)[4]) {});
        }
      }
    });
  }
}

// grad_w = grad_y^T x: tiles of 128 rows of the weight by 256 columns. Both operands lie transposed.
template <class T>
struct HopperGradWeightKernel {
  static constexpr int kDown = 128, kAcross = 256, kLeft = kDown / 64 * kBlock;
  static constexpr int kStageBytes = kLeft + kAcross / 64 * kBlock;
};

template <class T>
PARTKERNELS_KERNEL PARTKERNELS_BOUNDS(kHopperThreads,
                                      1) void hopper_grad_weight(PARTKERNELS_ARGUMENT HopperProduct<T> maps) {
  using Kernel = HopperGradWeightKernel<T>;
  const Product<T>& p = maps.product;
  char* const memory = shared_memory();
  const HopperRing ring = hopper_ring(p.stages, Kernel::kStageBytes);
  synchronize_block();

  const Tiles<> tiles{divide_up(p.down, Kernel::kDown), divide_up(p.across, Kernel::kAcross)};
  const int groups = divide_up(p.terms, kGroup);
  if (thread_index() < kWarpgroup) {
    ring.fill(tiles, groups, [&](SharedAddress left, SharedAddress full, int tile_row, int tile_col, int group) {
      arrive_and_expect(full, Kernel::kStageBytes);
      for (int b = 0; b < Kernel::kDown / 64; ++b) {
        load_box(left + b * kBlock, maps.left, tile_row * Kernel::kDown + 64 * b, group * kGroup, full);
      }
      for (int b = 0; b < Kernel::kAcross / 64; ++b) {
        load_box(left + Kernel::kLeft + b * kBlock, maps.right, tile_col * Kernel::kAcross + 64 * b, group * kGroup,
                 full);
      }
    });
  } else {
    take_registers<240>();
    Turn turn;
    const int thread = thread_index() - kWarpgroup, warp = thread / kWarp, warpgroup = thread / kWarpgroup;
    float d[Kernel::kAcross / 2];
    tiles.each([&](int tile_row, int tile_col) {
      for (int i = 0; i < groups; ++i) {
        wait(ring.full(turn.stage), turn.parity);
        const SharedAddress left = ring.stage(turn.stage) + warpgroup * kBlock;
        const SharedAddress right = ring.stage(turn.stage) + Kernel::kLeft;
        begin_products();
        PARTKERNELS_UNROLL
        for (int s = 0; s < kTermSteps; ++s) {
          Products<T, Kernel::kAcross>::template add<1, 1>(d, operand(left + s * kTermBytes, 1024, kBlock),
                                                           operand(right + s * kTermBytes, 1024, kBlock),
                                                           i > 0 || s > 0);
        }
        commit_products();
        turn.advance(p.stages);
        wait_for_products<1>();
        if (i > 0) ring.release(turn, 2);
      }
      wait_for_products<0>();
      ring.release(turn, 1);
      char* const turned = memory + p.stages * Kernel::kStageBytes + warp * kTurned;
      PARTKERNELS_UNROLL
      for (int chunk = 0; chunk < Kernel::kAcross / 64; ++chunk) {
        store_rows(p, d + 32 * chunk, tile_row * Kernel::kDown + 16 * warp, tile_col * Kernel::kAcross + 64 * chunk,
                   turned, [&](int row, int col, uint32_t (&words)[4]) {
                     const uint8_t* const owners = p.weight.map + row * p.weight.row_bytes;
                     PARTKERNELS_UNROLL
                     for (int e = 0; e < 8; ++e) {
                       const bool learns = id_at(owners, col + e, p.weight.bits) == p.update - 1;
                       if (!learns) words[e / 2] &= e % 2 == 0 ? 0xFFFF0000 : 0x0000FFFF;
                     }
                   });
      }
    });
  }
}

}  // namespace partkernels::cuda
