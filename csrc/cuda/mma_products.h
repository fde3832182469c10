// Products of 16-bit matrices by tensor cores, a warp at a time: for compute capability 8.0 and newer, and any strides.
//
// A block makes a tile of 128 by kAcross; each step of a sum is 64 terms. The next tiles are copied while the one in
// between is rebuilt in place and the first is multiplied, without a barrier in between.
#pragma once

#include "launch.h"
#include "tiles.h"

namespace partkernels::cuda {

template <class T, Work kWork, DefaultKind kKind, int kAcross, bool kAligned>
struct MmaKernel {
  static constexpr int kDown = 128, kTerms = kGroup, kThreads = 256;
  static constexpr bool kRebuilds = kWork != Work::grad_weight;
  static constexpr bool kStored = kRebuilds && kKind == DefaultKind::stored;
  // Whether an operand lies with its terms next to each other.
  static constexpr bool kLeftByTerms = kWork != Work::grad_weight, kRightByTerms = kWork == Work::forward;
  static constexpr int kLeftRows = kLeftByTerms ? kDown : kTerms, kLeftCols = kLeftByTerms ? kTerms : kDown;
  static constexpr int kRightRows = kRightByTerms ? kAcross : kTerms, kRightCols = kRightByTerms ? kTerms : kAcross;
  using Left = Tile<kLeftRows, kLeftCols>;
  using Right = Tile<kRightRows, kRightCols>;
  static constexpr int kStored0 = Left::kBytes + Right::kBytes, kMap = kStored0 + (kStored ? Right::kBytes : 0);

  static PARTKERNELS_FUNCTION int stage_bytes(int bits) {
    return kMap + (kRebuilds ? kRightRows * map_bytes(kRightCols, bits) : 0);
  }
};

template <class T, Work kWork, DefaultKind kKind, int kAcross, bool kAligned>
PARTKERNELS_KERNEL PARTKERNELS_BOUNDS(256, 1) void mma_product(PARTKERNELS_ARGUMENT Product<T> p) {
  using Kernel = MmaKernel<T, kWork, kKind, kAcross, kAligned>;
  constexpr int kDown = Kernel::kDown;
  const int stage_bytes = Kernel::stage_bytes(p.weight.bits);
  char* const memory = shared_memory();
  int tile_row, tile_col;
  tile_of(block_index(), divide_up(p.down, kDown), divide_up(p.across, kAcross), &tile_row, &tile_col);
  const int i0 = tile_row * kDown, j0 = tile_col * kAcross;
  const int steps = divide_up(p.terms, Kernel::kTerms);
  const auto stage = [&](int step) { return memory + step % p.stages * stage_bytes; };

  const auto load = [&](int step) {
    if (step < steps) {
      char* const left = stage(step);
      char* const right = left + Kernel::Left::kBytes;
      const int t0 = step * Kernel::kTerms;
      const int left_row = Kernel::kLeftByTerms ? i0 : t0, left_col = Kernel::kLeftByTerms ? t0 : i0;
      const int right_row = Kernel::kRightByTerms ? j0 : t0, right_col = Kernel::kRightByTerms ? t0 : j0;
      const Operand<T>& from = Kernel::kRebuilds ? p.weight.weight : p.right;
      const auto tile = [&]<int kRows, int kCols>(Tile<kRows, kCols>, char* to, const Operand<T>& of, int row,
                                                  int col) {
        if constexpr (kAligned) {
          copy_tile<T, kRows, kCols>(shared_address(to), of, row, col, whole_block());
        } else {
          gather_tile<T, kRows, kCols>(to, of, row, col);
        }
      };
      tile(typename Kernel::Left(), left, p.left, left_row, left_col);
      tile(typename Kernel::Right(), right, from, right_row, right_col);
      if constexpr (Kernel::kStored) {
        tile(typename Kernel::Right(), left + Kernel::kStored0, p.weight.stored, right_row, right_col);
      }
      if constexpr (Kernel::kRebuilds) {
        copy_map<T, Kernel::kRightRows, Kernel::kRightCols>(shared_address(left + Kernel::kMap), p.weight, right_row,
                                                            right_col, whole_block());
      }
    }
    commit_copies();
  };
  const auto rebuild = [&](int step) {
    if constexpr (Kernel::kRebuilds) {
      if (step >= steps) return;
      char* const left = stage(step);
      const int t0 = step * Kernel::kTerms;
      const int row = Kernel::kRightByTerms ? j0 : t0, col = Kernel::kRightByTerms ? t0 : j0;
      rebuild_tile<T, kKind, Kernel::kRightRows, Kernel::kRightCols>(
          left + Kernel::Left::kBytes, left + Kernel::kStored0,
          reinterpret_cast<const uint8_t*>(left + Kernel::kMap) + col * p.weight.bits / 8 % 16,
          map_bytes(Kernel::kRightCols, p.weight.bits), p.weight, row, col, whole_block());
    }
  };

  // Warps are 2 by 4: each has 64 by kAcross / 4, in products of 16 by 8.
  constexpr int kHigh = 4, kWide = kAcross / 4 / 8;
  const int lane = thread_index() % kWarp, warp = thread_index() / kWarp;
  const int warp_row = warp / 4 * 64, warp_col = warp % 4 * (kAcross / 4);
  float sums[kHigh][kWide][4] = {};
  const auto multiply = [&](int step) {
    const SharedAddress left = shared_address(stage(step)), right = left + Kernel::Left::kBytes;
    PARTKERNELS_UNROLL
    for (int t = 0; t < Kernel::kTerms; t += 16) {
      uint32_t a[kHigh][4], b[kWide / 2][4];
      PARTKERNELS_UNROLL
      for (int i = 0; i < kHigh; ++i) {
        const int row = warp_row + 16 * i;
        if constexpr (Kernel::kLeftByTerms) {
          load_matrices(left + Kernel::Left::offset(row + lane % 16, t / 8 + lane / 16), a[i]);
        } else {
          load_transposed_matrices(left + Kernel::Left::offset(t + lane % 8 + lane / 16 * 8, row / 8 + lane / 8 % 2),
                                   a[i]);
        }
      }
      PARTKERNELS_UNROLL
      for (int j = 0; j < kWide / 2; ++j) {
        const int col = warp_col + 16 * j;
        if constexpr (Kernel::kRightByTerms) {
          load_matrices(right + Kernel::Right::offset(col + lane % 8 + lane / 16 * 8, t / 8 + lane / 8 % 2), b[j]);
        } else {
          load_transposed_matrices(right + Kernel::Right::offset(t + lane % 16, col / 8 + lane / 16), b[j]);
        }
      }
      PARTKERNELS_UNROLL
      for (int i = 0; i < kHigh; ++i) {
        PARTKERNELS_UNROLL
        for (int j = 0; j < kWide; ++j) {
          add_product<T>(sums[i][j], a[i], b[j / 2][2 * (j % 2)], b[j / 2][2 * (j % 2) + 1]);
        }
      }
    }
  };

  load(0);
  load(1);
  wait_for_copies<1>();
  synchronize_block();
  rebuild(0);
  for (int step = 0; step < steps; ++step) {
    wait_for_copies<0>();
    synchronize_block();
    if (p.stages > 2) load(step + 2);
    rebuild(step + 1);
    multiply(step);
    if (p.stages == 2) {
      synchronize_block();
      load(step + 2);
    }
  }

  PARTKERNELS_UNROLL
  for (int i = 0; i < kHigh; ++i) {
    PARTKERNELS_UNROLL
    for (int j = 0; j < kWide; ++j) {
      PARTKERNELS_UNROLL
      for (int e = 0; e < 4; ++e) {
        store_result<T, kWork>(p, i0 + warp_row + 16 * i + lane / 4 + e / 2 * 8,
                               j0 + warp_col + 8 * j + 2 * (lane % 4) + e % 2, sums[i][j][e]);
      }
    }
  }
}

}  // namespace partkernels::cuda
