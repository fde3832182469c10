// An optimiser step for the entries of one partition, in one pass: parameter, gradient and state are read and written
// once, and cache lines without an entry of the partition are not written.
#pragma once

#include "accumulator.h"
#include "isa.h"
#include "mask.h"
#include "taps_together.h"
#include "weight_tile.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

// Entries that are stepped together, or skipped if none is owned: a cache line of float32.
constexpr int64_t kGroup = 16;
// Columns of a row that are decoded before they are stepped.
constexpr int64_t kPiece = 2 * kStretch;
// The minimum number of entries of a task.
constexpr int64_t kEntriesPerTask = 1 << 15;
// The prefetch distance in bytes. The processor's own prefetching stops at the end of a page; this made steps of
// 2048x2048 weights about 10 % faster (Zen 5); 4 and 8 KiB gained less.
constexpr int64_t kAhead = 2048;

// An integer type of the accumulator's size for masks. With lanes of one width, GCC 12 makes a group one vector; with
// byte masks it would use a quarter of a vector.
template <class T>
using Lane = std::conditional_t<std::is_same_v<T, double>, uint64_t, uint32_t>;

// All ones if entry j of a group is stepped, otherwise zeros.
template <class Lane>
Lane mask_of(Lane kept, Lane j) {
  return -(kept >> j & 1);
}

// mask ? yes : no, by bit operations. A conditional expression compiles to masked loads. For memory that is not in a
// cache, they made Adam's step take 2.3 times as long (Zen 5).
template <class T>
T blend(Lane<T> mask, T yes, T no) {
  return std::bit_cast<T>((std::bit_cast<Lane<T>>(yes) & mask) | (std::bit_cast<Lane<T>>(no) & ~mask));
}

// All entries of a group are computed; those of other partitions are rewritten with their own bits.
template <class Acc>
struct SgdStep {
  SgdFactors<Acc> by;
  Lane<Acc> decays, nesterov;  // all ones if true, otherwise zeros

  explicit SgdStep(const Sgd& sgd) : by(sgd), decays(-Lane<Acc>{by.decays}), nesterov(-Lane<Acc>{by.nesterov}) {}

  __attribute__((always_inline)) void group(Lane<Acc> kept, const Acc* g, std::array<Acc*, 1> written) const {
    Acc* const p = written[0];
#pragma GCC ivdep
    for (Lane<Acc> j = 0; j < kGroup; ++j) {
      const Acc grad = blend(decays, g[j] + by.weight_decay * p[j], g[j]);
      p[j] = blend(mask_of(kept, j), p[j] - by.lr * grad, p[j]);
    }
  }

  __attribute__((always_inline)) void group(Lane<Acc> kept, const Acc* g, std::array<Acc*, 2> written) const {
    Acc* const p = written[0];
    Acc* const buffer = written[1];
#pragma GCC ivdep
    for (Lane<Acc> j = 0; j < kGroup; ++j) {
      const Acc grad = blend(decays, g[j] + by.weight_decay * p[j], g[j]);
      const Acc velocity = by.momentum * buffer[j] + grad;
      const Acc direction = blend(nesterov, grad + by.momentum * velocity, velocity);
      buffer[j] = blend(mask_of(kept, j), velocity, buffer[j]);
      p[j] = blend(mask_of(kept, j), p[j] - by.lr * direction, p[j]);
    }
  }
};

template <class Acc>
struct AdamStep {
  AdamFactors<Acc> by;
  Lane<Acc> decays, near_grad;

  explicit AdamStep(const Adam& adam)
      : by(adam), decays(-Lane<Acc>{by.decays}), near_grad(-Lane<Acc>{by.is_near_grad}) {}

  __attribute__((always_inline)) void group(Lane<Acc> kept, const Acc* g, std::array<Acc*, 3> written) const {
    Acc* const p = written[0];
    Acc* const exp_avg = written[1];
    Acc* const exp_avg_sq = written[2];
#pragma GCC ivdep
    for (Lane<Acc> j = 0; j < kGroup; ++j) {
      const Acc grad = blend(decays, g[j] + by.weight_decay * p[j], g[j]);
      const Acc mean = blend(near_grad, grad, exp_avg[j]) + by.lerp * (grad - exp_avg[j]);
      const Acc variance = by.beta2 * exp_avg_sq[j] + by.square * grad * grad;
      const Acc denominator = std::sqrt(variance) * by.inverse_correction + by.eps;
      const Acc next = by.shrink * p[j] - by.step_size * mean / denominator;
      p[j] = blend(mask_of(kept, j), next, p[j]);
      exp_avg[j] = blend(mask_of(kept, j), mean, exp_avg[j]);
      exp_avg_sq[j] = blend(mask_of(kept, j), variance, exp_avg_sq[j]);
    }
  }
};

inline void widen_group(const bfloat16* group, float* wide) {
  for (int64_t j = 0; j < kGroup; ++j) wide[j] = to_float(group[j]);
}

// Selects again by mask, because a NaN does not keep its bits on its way through float32.
inline void narrow_group(const float* wide, uint32_t kept, bfloat16* group) {
  for (uint32_t j = 0; j < kGroup; ++j) {
    const uint32_t mask = mask_of(kept, j);
    group[j].bits = static_cast<uint16_t>((to_bfloat16(wide[j]).bits & mask) | (group[j].bits & ~mask));
  }
}

// Contiguous entries of the N tensors that a step writes (the parameter and its state) and of the gradient.
template <class T, size_t N>
struct Slice {
  std::array<T*, N> written;
  const T* grad;

  Slice operator+(int64_t entries) const {
    Slice moved{written, grad + entries};
    for (T*& pointer : moved.written) pointer += entries;
    return moved;
  }
};

template <class T, size_t N, class Step>
__attribute__((always_inline)) inline void step_group(const Slice<T, N>& slice, uint32_t kept, const Step& step) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    float grad[kGroup], wide[N][kGroup];
    std::array<float*, N> pointers;
    widen_group(slice.grad, grad);
    for (size_t i = 0; i < N; ++i) {
      pointers[i] = wide[i];
      widen_group(slice.written[i], wide[i]);
    }
    step.group(kept, grad, pointers);
    for (size_t i = 0; i < N; ++i) narrow_group(wide[i], kept, slice.written[i]);
  } else {
    step.group(kept, slice.grad, slice.written);
  }
}

// Steps those of n entries that have a set bit: bit j % 64 of kept[j / 64].
template <class T, size_t N, class Step>
void step_slice(const Slice<T, N>& slice, const uint64_t* kept, int64_t n, const Step& step) {
  const auto kept_from = [kept](int64_t j) { return static_cast<uint16_t>(kept[j / 64] >> j % 64); };
  int64_t start = 0;
  for (; start + kGroup <= n; start += kGroup) {
    const Slice<T, N> group = slice + start;
    __builtin_prefetch(group.grad + kAhead / sizeof(T));
    for (T* pointer : group.written) __builtin_prefetch(pointer + kAhead / sizeof(T), 1);
    const uint16_t mask = kept_from(start);
    if (mask != 0) step_group(group, mask, step);
  }
  if (start == n) return;
  T grad[kGroup] = {}, values[N][kGroup] = {};
  const Slice<T, N> rest = slice + start;
  Slice<T, N> group{{}, grad};
  std::copy_n(rest.grad, n - start, grad);
  for (size_t i = 0; i < N; ++i) group.written[i] = std::copy_n(rest.written[i], n - start, values[i]) - (n - start);
  step_group(group, kept_from(start), step);
  for (size_t i = 0; i < N; ++i) std::copy_n(values[i], n - start, rest.written[i]);
}

// The memory layout of the entries of a row.
enum class Order {
  columns,    // contiguous in the order of the map's columns: linear and channels_last weights
  taps,       // contiguous with the taps of a channel together: contiguous convolution weights
  scattered,  // neither
};

// The tensors of a step.
template <class T, size_t N>
struct Tensors {
  std::array<Weight<T>, N> written;
  Weight<const T> grad;

  Order order() const {
    const auto all = [this](const auto& holds) {
      return holds(grad) && std::all_of(written.begin(), written.end(), holds);
    };
    if (all([](const auto& weight) { return rows_are_contiguous(weight); })) return Order::columns;
    const bool taps = all([](const auto& weight) { return taps_are_contiguous(weight); });
    return taps && grad.height * grad.width <= kMaxTaps ? Order::taps : Order::scattered;
  }

  Slice<T, N> row(int64_t row) const {
    Slice<T, N> slice{{}, grad.data + row * grad.row_stride};
    for (size_t i = 0; i < N; ++i) slice.written[i] = written[i].data + row * written[i].row_stride;
    return slice;
  }
};

// Steps n entries of a row, at most kPiece, with any strides, through buffers.
template <class T, size_t N, class Step>
void step_scattered(const Tensors<T, N>& tensors, int64_t row, int64_t col, int64_t n, const uint64_t* kept,
                    const Step& step) {
  T grad[kPiece], values[N][kPiece];
  Slice<T, N> slice{{}, grad};
  for_each_entry(tensors.grad, row, col, n, [&](int64_t j, const T* entry) { grad[j] = *entry; });
  for (size_t i = 0; i < N; ++i) {
    slice.written[i] = values[i];
    for_each_entry(tensors.written[i], row, col, n, [&](int64_t j, T* entry) { values[i][j] = *entry; });
  }
  step_slice(slice, kept, n, step);
  for (size_t i = 0; i < N; ++i) {
    for_each_entry(tensors.written[i], row, col, n, [&](int64_t j, T* entry) { *entry = values[i][j]; });
  }
}

template <class T, size_t N, class Step>
void step_owned(const Tensors<T, N>& tensors, const Owners& owners, int partition, const Step& step,
                const ParallelFor& parallel_for) {
  const Weight<const T>& w = tensors.grad;
  const Order order = tensors.order();
  const MaskDecoder decode(owners, w.cols(), partition, partition);
  const int64_t cols = w.cols();
  const TapsTogether put_taps_together(w.in, order == Order::taps ? w.height * w.width : 0);
  const int64_t piece = order == Order::taps ? cols : std::min(cols, kPiece);
  if (piece == 0) return;
  const int64_t pieces = (cols + piece - 1) / piece;
  const int64_t total = w.rows * pieces;
  const int64_t per_task = std::max<int64_t>(1, kEntriesPerTask / piece);
  parallel_for((total + per_task - 1) / per_task, [&](int64_t begin, int64_t end) {
    std::vector<uint64_t> kept((piece + kStretch) / 64 + 1, ~uint64_t{0}), columns(kept);
    for (int64_t index = begin * per_task; index < std::min(end * per_task, total); ++index) {
      const int64_t row = index / pieces, start = index % pieces * piece, n = std::min(piece, cols - start);
      if (owners.map != nullptr) {
        if (order == Order::taps) {
          decode(row, 0, cols, columns.data());
          put_taps_together(columns.data(), kept.data());
        } else {
          decode(row, start, n, kept.data());
        }
      }
      if (order == Order::scattered) {
        step_scattered(tensors, row, start, n, kept.data(), step);
      } else {
        step_slice(tensors.row(row) + start, kept.data(), n, step);
      }
    }
  });
}

template <class T>
void sgd_step(Weight<T> parameter, Weight<const T> grad, Weight<T> momentum_buffer, const Owners& owners, int update,
              const Sgd& sgd, const ParallelFor& parallel_for) {
  const SgdStep<Accumulator<T>> step(sgd);
  if (sgd.momentum == 0) {
    step_owned(Tensors<T, 1>{{parameter}, grad}, owners, update, step, parallel_for);
  } else {
    step_owned(Tensors<T, 2>{{parameter, momentum_buffer}, grad}, owners, update, step, parallel_for);
  }
}

template <class T>
void adam_step(Weight<T> parameter, Weight<const T> grad, Weight<T> exp_avg, Weight<T> exp_avg_sq, const Owners& owners,
               int update, const Adam& adam, const ParallelFor& parallel_for) {
  step_owned(Tensors<T, 3>{{parameter, exp_avg, exp_avg_sq}, grad}, owners, update, AdamStep<Accumulator<T>>(adam),
             parallel_for);
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
