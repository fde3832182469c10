// Shared by the kernels for compute capability 9.0: a warp that fetches, two warpgroups that multiply, and a ring of
// stages in shared memory between them.
#pragma once

#include "hopper_intrinsics.h"
#include "launch.h"
#include "matmul_kernels.h"
#include "shared_memory_tiles.h"

namespace partkernels::cuda {

constexpr int kMultipliers = 2 * kWarpgroup;
constexpr int kHopperThreads = kWarpgroup + kMultipliers, kHopperWarps = kMultipliers / kWarp;
constexpr int kLeastStages = 3, kMostStages = 8;
// The buffer in which each warp transposes its results: 64 entries by 16.
constexpr int kTurned = 64 * 16 * 2;
constexpr int kFixedBytes = kHopperWarps * kTurned + 2 * 8 * kMostStages;

// A product and its operands for the copy engine.
template <class T>
struct HopperProduct {
  TensorMap left = {}, weight = {}, stored = {}, map = {};
  Product<T> product = {};
};

// A position in the ring of stages.
struct Turn {
  int stage = 0, parity = 0;

  // The stage `turns` turns ago, for fewer turns than stages.
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

// Calls make with each of a block's tasks, one after another.
template <class T, class Make>
PARTKERNELS_DEVICE void each_task(const Product<T>& p, int tiles_down, int tiles_across, const Make& make) {
  for (int i = block_index(); i < tiles_down * tiles_across * p.shares; i += blocks()) {
    make(task_of(p, i, tiles_down, tiles_across));
  }
}

// The addresses of the stages and their barriers.
struct HopperPipeline {
  SharedAddress base, barriers;
  int bytes, count;

  PARTKERNELS_DEVICE SharedAddress stage(int i) const { return base + i * bytes; }
  PARTKERNELS_DEVICE SharedAddress full(int i) const { return barriers + 8 * i; }
  PARTKERNELS_DEVICE SharedAddress empty(int i) const { return barriers + 8 * (count + i); }

  // The role of the fetching warp. For each task and each group of its terms, once a stage is empty, fetch(stage, full,
  // task, group) announces copies to the barrier `full` and starts them.
  template <class T, class Fetch>
  PARTKERNELS_DEVICE void fill(const Product<T>& p, int tiles_down, int tiles_across, const Fetch& fetch) const {
    give_registers<24>();
    if (thread_index() != 0) return;
    Turn turn;
    each_task(p, tiles_down, tiles_across, [&](const Task& task) {
      for (int group = task.first; group < task.last; ++group) {
        wait(empty(turn.stage), turn.parity ^ 1);
        fetch(stage(turn.stage), full(turn.stage), task, group);
        turn.advance(count);
      }
    });
  }

  // Signals that this warp no longer needs the stage of `turns_ago` turns ago.
  PARTKERNELS_DEVICE void release(const Turn& turn, int turns_ago) const {
    synchronize_warp();
    if (thread_index() % kWarp == 0) arrive(empty(turn.before(turns_ago, count)));
  }
};

// Creates the barriers; the block must synchronise before it uses them.
PARTKERNELS_DEVICE HopperPipeline hopper_pipeline(int stages, int stage_bytes) {
  const SharedAddress base = shared_address(shared_memory());
  const HopperPipeline pipeline{base, base + stages * stage_bytes + kHopperWarps * kTurned, stage_bytes, stages};
  if (thread_index() == 0) {
    for (int i = 0; i < stages; ++i) {
      make_barrier(pipeline.full(i), 1);
      make_barrier(pipeline.empty(i), kHopperWarps);
    }
    publish_barriers();
  }
  return pipeline;
}

// Sets p.stages to the number for which a block has memory; returns whether it is large enough.
template <class T>
bool plan_stages(const Device& device, int stage_bytes, Product<T>* p) {
  p->stages = min_of((device.shared_memory - kFixedBytes) / stage_bytes, kMostStages);
  return p->stages >= kLeastStages;
}

// Persistent blocks compute the tiles of a product, and share sums if there are few tiles.
template <class T>
Status launch_hopper(void (*kernel)(HopperProduct<T>), const Device& device, HopperProduct<T> p, int tiles,
                     int stage_bytes, Stream stream) {
  const int shared = kFixedBytes + p.product.stages * stage_bytes;
  return launch_shared(device, p.product, tiles, stream, [&](const Product<T>& product, int tasks) {
    p.product = product;
    return launch(kernel, {min_of(tasks, device.multiprocessors), kHopperThreads, shared}, stream, p);
  });
}

// A box of 64 columns of a 16-bit matrix.
template <class T>
Status make_map(const Operand<T>& matrix, int rows, TensorMap* map) {
  return make_map(Box{matrix.data, matrix.rows, matrix.cols, 2 * matrix.row_stride, 2, rows, kGroup, true}, map);
}
// A box of the packed map, for `cols` columns.
template <class T>
Status make_map(const Rebuilt<T>& w, int rows, int cols, TensorMap* map) {
  return make_map(Box{w.map, w.weight.rows, w.row_bytes, w.row_bytes, 1, rows, map_bytes(cols, w.bits), false}, map);
}

}  // namespace partkernels::cuda
