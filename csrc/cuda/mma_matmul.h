// Products of 16-bit matrices by tensor cores, a warp at a time: for compute capability 8.0 and newer, and any strides.
//
// A block makes a tile of 128 by kAcross; each step of a sum is 64 terms. The next tiles are copied while the one in
// between is rebuilt in place and the first is multiplied, without a barrier in between.
#pragma once

#include "launch.h"
#include "shared_memory_tiles.h"

namespace partkernels::cuda {

template <class T, Work kWork, DefaultKind kKind, int kAcross, bool kAligned>
struct MmaKernel {
  static constexpr int kDown = 128, kThreads = 256;
  static constexpr bool kStored = kKind == DefaultKind::stored;
  // Whether the weight lies with its terms next to each other.
  static constexpr bool kByTerms = kWork == Work::forward;
  static constexpr int kRows = kByTerms ? kAcross : kGroup, kCols = kByTerms ? kGroup : kAcross;
  using Left = Tile<kDown, kGroup>;
  using Right = Tile<kRows, kCols>;
  static constexpr int kStored0 = Left::kBytes + Right::kBytes, kMap = kStored0 + (kStored ? Right::kBytes : 0);

  static PARTKERNELS_FUNCTION int stage_bytes(int bits) { return kMap + kRows * map_bytes(kCols, bits); }
};

template <class T, Work kWork, DefaultKind kKind, int kAcross, bool kAligned>
PARTKERNELS_KERNEL PARTKERNELS_BOUNDS(256, 1) void mma_product(PARTKERNELS_ARGUMENT Product<T> p) {
  using Kernel = MmaKernel<T, kWork, kKind, kAcross, kAligned>;
  constexpr int kDown = Kernel::kDown, kRows = Kernel::kRows, kCols = Kernel::kCols;
  const int stage_bytes = Kernel::stage_bytes(p.weight.bits);
  char* const memory = shared_memory();
  const Task task = task_of(p, block_index(), divide_up(p.down, kDown), divide_up(p.across, kAcross));
  const int i0 = task.row * kDown, j0 = task.col * kAcross;
  const Crew<Kernel::kThreads> crew{thread_index()};
  const auto stage = [&](int step) { return memory + step % p.stages * stage_bytes; };
  // Where a step's tile of the weight begins.
  const auto row_of = [&](int step) { return Kernel::kByTerms ? j0 : step * kGroup; };
  const auto col_of = [&](int step) { return Kernel::kByTerms ? step * kGroup : j0; };

  const auto load = [&](int step) {
    if (step < task.last) {
      char* const left = stage(step);
      char* const right = left + Kernel::Left::kBytes;
      const auto tile = [&]<int kHigh, int kWide>(Tile<kHigh, kWide>, char* to, const Operand<T>& of, int row,
                                                  int col) {
        if constexpr (kAligned) {
          copy_tile<T, kHigh, kWide>(shared_address(to), of, row, col, crew);
        } else {
          gather_tile<T, kHigh, kWide>(to, of, row, col, crew);
        }
      };
      tile(typename Kernel::Left(), left, p.left, i0, step * kGroup);
      tile(typename Kernel::Right(), right, p.weight.weight, row_of(step), col_of(step));
      if constexpr (Kernel::kStored) {
        tile(typename Kernel::Right(), left + Kernel::kStored0, p.weight.stored, row_of(step), col_of(step));
      }
      copy_map<T, kRows, kCols>(shared_address(left + Kernel::kMap), p.weight, row_of(step), col_of(step), crew);
    }
    commit_copies();
  };
  const auto rebuild = [&](int step) {
    if (step >= task.last) return;
    char* const left = stage(step);
    const auto* const map = reinterpret_cast<const uint8_t*>(left + Kernel::kMap);
    rebuild_tile<T, kKind, kRows, kCols, false>(
        left + Kernel::Left::kBytes, left + Kernel::kStored0, map + col_of(step) * p.weight.bits / 8 % 16,
        map_bytes(kCols, p.weight.bits), p.weight, row_of(step), col_of(step), crew);
  };

  // Warps are 2 by 4: each has 64 by kAcross / 4, in products of 16 by 8.
  constexpr int kHigh = 4, kWide = kAcross / 4 / 8;
  const int lane = thread_index() % kWarp, warp = thread_index() / kWarp;
  const int warp_row = warp / 4 * 64, warp_col = warp % 4 * (kAcross / 4);
  float sums[kHigh][kWide][4] = {};
  const auto multiply = [&](int step) {
    const SharedAddress left = shared_address(stage(step)), right = left + Kernel::Left::kBytes;
    PARTKERNELS_UNROLL
    for (int t = 0; t < kGroup; t += 16) {
      uint32_t a[kHigh][4], b[kWide / 2][4];
      PARTKERNELS_UNROLL
      for (int i = 0; i < kHigh; ++i) {
        load_matrices(left + Kernel::Left::offset(warp_row + 16 * i + lane % 16, t / 8 + lane / 16), a[i]);
      }
      PARTKERNELS_UNROLL
      for (int j = 0; j < kWide / 2; ++j) {
        const int col = warp_col + 16 * j;
        if constexpr (Kernel::kByTerms) {
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

  load(task.first);
  load(task.first + 1);
  wait_for_copies<1>();
  synchronize_block();
  rebuild(task.first);
  for (int step = task.first; step < task.last; ++step) {
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
        const int row = i0 + warp_row + 16 * i + lane / 4 + e / 2 * 8;
        const int col = j0 + warp_col + 8 * j + 2 * (lane % 4) + e % 2;
        if (row >= p.down || col >= p.across) continue;
        if (p.shares > 1) {
          partial_row(p, task.share, row)[col] = sums[i][j][e];
        } else {
          store_result(p, row, col, sums[i][j][e]);
        }
      }
    }
  }
}

}  // namespace partkernels::cuda
