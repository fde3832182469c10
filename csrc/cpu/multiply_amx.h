// Multiplies two packed blocks of pairs with AMX, in tiles of 16 rows of 16 pairs or sums.
//
// Panels of the right block already have the layout of AMX's right operand, and rows of the left block that of the left
// one.
#pragma once

#include "amx.h"
#include "microkernel.h"
#include "transpose.h"
#include "weight_tile.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

constexpr int64_t kTile = 16;
constexpr int64_t kTileEntries = kTile * kUnitDepth<Pair>;  // entries of a row of a left tile
static_assert(kTall == 2 * kTile && kPanel<Pair> == 2 * kTile && kDepth<Pair> % kTile == 0);

// Configures the thread's tiles to full size, and releases them when destroyed. Other users of tiles, such as oneDNN,
// set their own configuration.
class Tiles {
 public:
  Tiles() {
    amx::Configuration whole;
    whole.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      whole.row_bytes[tile] = 64;
      whole.rows[tile] = kTile;
    }
    amx::configure(whole);
  }
  ~Tiles() { amx::release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// Entries of the depth that are rebuilt at once. A panel of them takes 32 KiB, and stays in the first-level cache.
constexpr int64_t kStrip = 512;

// The layout of a left block, in pairs: the distance between rows, between tiles of rows, and between steps of depth.
// passes_by: whether it comes from the second-level cache while the right block stays in the first; otherwise the left
// block stays.
struct LeftBlock {
  int64_t row, tile, step;
  bool passes_by;
};
constexpr LeftBlock kRowsOfDepth{kDepth<Pair>, kTile * kDepth<Pair>, kTile, false};

// sum[r][panel] (+)= left[r] times one panel of the right block, for Tall tiles of rows r; depth is a multiple of the
// tile's. Tiles 0 to 3 hold sums, 4 and 5 the left block, 6 and 7 the right one. Four chains of products hide the
// latency of each.
template <int Tall, LeftBlock kLeft>
void multiply_tiles(const Pair* left, const Pair* right, int64_t depth, bool accumulate, float* sum,
                    int64_t sum_stride) {
  constexpr int64_t kLeftBytes = kLeft.row * sizeof(Pair), kRightBytes = kPanel<Pair> * sizeof(Pair);
  const int64_t sum_bytes = sum_stride * sizeof(float);
  float* const lower = sum + kTile * sum_stride;
  const auto load_left = [&]<int to>(std::integral_constant<int, to>, const Pair* from) __attribute__((always_inline)) {
    if constexpr (kLeft.passes_by) {
      amx::load_once<to>(from, kLeftBytes);
    } else {
      amx::load<to>(from, kLeftBytes);
    }
  };
  if (accumulate) {
    amx::load<0>(sum, sum_bytes);
    amx::load<1>(sum + kTile, sum_bytes);
    if constexpr (Tall == 2) {
      amx::load<2>(lower, sum_bytes);
      amx::load<3>(lower + kTile, sum_bytes);
    }
  } else {
    amx::zero<0>();
    amx::zero<1>();
    amx::zero<2>();
    amx::zero<3>();
  }
  for (int64_t k = 0; k < depth; k += kTile) {
    load_left(std::integral_constant<int, 4>{}, left);
    amx::load<6>(right, kRightBytes);
    amx::add_product<0, 4, 6>();
    amx::load<7>(right + kTile, kRightBytes);
    amx::add_product<1, 4, 7>();
    if constexpr (Tall == 2) {
      load_left(std::integral_constant<int, 5>{}, left + kLeft.tile);
      amx::add_product<2, 5, 6>();
      amx::add_product<3, 5, 7>();
    }
    left += kLeft.step;
    right += kTile * kPanel<Pair>;
  }
  amx::store<0>(sum, sum_bytes);
  amx::store<1>(sum + kTile, sum_bytes);
  if constexpr (Tall == 2) {
    amx::store<2>(lower, sum_bytes);
    amx::store<3>(lower + kTile, sum_bytes);
  }
}

// Appends zeros to the depth of a right block's panels, up to whole tiles: uninitialised memory may contain NaN, and
// NaN times zero is NaN.
inline void end_panels(int64_t depth, int64_t cols, Pair* panels, int64_t panel_units) {
  const int64_t missing = blocks_of(depth, kTile) * kTile - depth;
  for (int64_t j = 0; j < cols; j += kPanel<Pair>, panels += panel_units) {
    std::fill_n(panels + depth * kPanel<Pair>, missing * kPanel<Pair>, Pair{});
  }
}

// As in microkernel.h, in whole tiles. Sums in padding rows and columns are undefined, but the product must have memory
// for them. Padding units of depth are set to zero in both blocks.
template <class Unit, Layout layout>
void multiply(Unit* left, Unit* right, int64_t rows, int64_t cols, int64_t depth, bool accumulate, Sum<Unit>* product,
              int64_t product_stride) {
  const int64_t whole = blocks_of(depth, kTile) * kTile;
  end_panels(depth, cols, right, kPanel<Unit> * kDepth<Unit>);
  for (int64_t i = 0; i < rows; i += kTall) {
    const int64_t some = std::min(kTall, rows - i);
    Unit* part = left + i * kDepth<Unit>;
    alignas(64) Unit transposed[kTall * kDepth<Unit>];
    if constexpr (layout == Layout::depth_major) {
      part = transposed;
      for (int64_t r = 0; r < some; r += kTile) {
        for (int64_t k = 0; k < whole; k += kTile) {
          transpose16(reinterpret_cast<const uint32_t*>(left + k * kRows + i + r), kRows,
                      reinterpret_cast<uint32_t*>(part + r * kDepth<Unit> + k), kDepth<Unit>);
        }
      }
    }
    for (int64_t r = 0; r < some; ++r) std::fill_n(part + r * kDepth<Unit> + depth, whole - depth, Unit{});
    for (int64_t j = 0; j < cols; j += kPanel<Unit>) {
      (some > kTile ? multiply_tiles<2, kRowsOfDepth>
                    : multiply_tiles<1, kRowsOfDepth>)(part, right + j * kDepth<Unit>, whole, accumulate,
                                                       product + i * product_stride + j, product_stride);
    }
  }
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
