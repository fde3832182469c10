// What the kernels for compute capability 9.0 share: a warp that fetches, two warpgroups that multiply, and a ring of
// stages in shared memory between them.
#pragma once

#include "hopper.h"
#include "launch.h"
#include "products.h"
#include "tiles.h"

namespace partkernels::cuda {

constexpr int kMultipliers = 2 * kWarpgroup;
constexpr int kHopperThreads = kWarpgroup + kMultipliers, kHopperWarps = kMultipliers / kWarp;
constexpr int kLeastStages = 3, kMostStages = 8;
// What each warp turns its results around in: 64 entries by 16.
constexpr int kTurned = 64 * 16 * 2;
constexpr int kFixedBytes = kHopperWarps * kTurned + 2 * 8 * kMostStages;

// A product and its operands for the copy engine; `right` is x or the weight.
template <class T>
struct HopperProduct {
  TensorMap left = {}, right = {}, stored = {}, map = {};
  Product<T> product = {};
};

// A place in the ring of stages.
struct Turn {
  int stage = 0, parity = 0;

  // The stage so many turns ago, less than there are stages.
  PARTKERNELS_DEVICE int before(int turns, int stages) const {
    return stage < turns ? stage - turns + stages : stage - turns;
  }

  PARTKERNELS_DEVICE void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The tiles of the result that a block makes, or in a cluster that all of its blocks make together, one after the
// other.
template <int kCluster = 1>
struct Tiles {
  int down, across;

  template <class Make>
  PARTKERNELS_DEVICE void each(const Make& make) const {
    for (int tile = block_index() / kCluster; tile < down * across; tile += blocks() / kCluster) {
      int row, col;
      tile_of(tile, down, across, &row, &col);
      make(row, col);
    }
  }
};

// Where the stages and their barriers are.
struct HopperRing {
  SharedAddress base, barriers;
  int bytes, count;

  PARTKERNELS_DEVICE SharedAddress stage(int i) const { return base + i * bytes; }
  PARTKERNELS_DEVICE SharedAddress full(int i) const { return barriers + 8 * i; }
  PARTKERNELS_DEVICE SharedAddress empty(int i) const { return barriers + 8 * (count + i); }

  // What the threads that multiply do not take part in: for each tile and each group of its terms, once there is room,
  // fetch(stage, full, row, col, group) announces copies to the barrier `full` and starts them.
  template <class Tiles, class Fetch>
  PARTKERNELS_DEVICE void fill(const Tiles& tiles, int groups, const Fetch& fetch) const {
    give_registers<24>();
    if (thread_index() != 0) return;
    Turn turn;
    tiles.each([&](int row, int col) {
      for (int group = 0; group < groups; ++group) {
        wait(empty(turn.stage), turn.parity ^ 1);
        fetch(stage(turn.stage), full(turn.stage), row, col, group);
        turn.advance(count);
      }
    });
  }

  // Says for a warp that it has done with the stage of so many turns ago.
  PARTKERNELS_DEVICE void release(const Turn& turn, int turns_ago) const {
    synchronize_warp();
    if (thread_index() % kWarp == 0) arrive(empty(turn.before(turns_ago, count)));
  }
};

// Makes the barriers; the threads must meet before they use them.
PARTKERNELS_DEVICE HopperRing hopper_ring(int stages, int stage_bytes) {
  const SharedAddress base = shared_address(shared_memory());
  const HopperRing ring{base, base + stages * stage_bytes + kHopperWarps * kTurned, stage_bytes, stages};
  if (thread_index() == 0) {
    for (int i = 0; i < stages; ++i) {
      make_barrier(ring.full(i), 1);
      make_barrier(ring.empty(i), kHopperWarps);
    }
    publish_barriers();
  }
  return ring;
}

// Sets p.stages to as many as a block has memory for; whether there are enough.
template <class T>
bool plan_stages(const Device& device, int stage_bytes, Product<T>* p) {
  p->stages = min_of((device.shared_memory - kFixedBytes) / stage_bytes, kMostStages);
  return p->stages >= kLeastStages;
}

// A box of 64 columns of a 16-bit matrix.
template <class T>
Status make_map(const Operand<T>& matrix, int rows, TensorMap* map) {
  return make_map(Box{matrix.data, matrix.rows, matrix.cols, 2 * matrix.row_stride, 2, rows, kGroup, true}, map);
}
// Of the packed map, what `cols` columns need.
template <class T>
Status make_map(const Rebuilt<T>& w, int rows, int cols, TensorMap* map) {
  return make_map(Box{w.map, w.weight.rows, w.row_bytes, w.row_bytes, 1, rows, map_bytes(cols, w.bits), false}, map);
}

}  // namespace partkernels::cuda
