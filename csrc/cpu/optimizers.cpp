// An optimiser's step over the entries of one partition, in one pass: parameter, gradient and state are read once and
// written once, and cache lines of which it owns no entry are not written.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "accumulate.h"
#include "isa.h"
#include "owned.h"
#include "partkernels/cpu.h"
#include "rebuild.h"

namespace partkernels::cpu {
namespace {

// What a thread should at least have to do.
constexpr int64_t kEntriesPerTask = 1 << 15;
// Bytes. The processor's own prefetching stops at the end of a page; this made steps of 2048x2048 weights 5 to 10 %
// faster (Zen 5), and 4 and 8 KiB did less.
constexpr int64_t kAhead = 2048;

// What the step of a group computes in, and the integer of its size: with lanes of one width, GCC 12 makes one vector
// of a group; beside bytes it would use a quarter of a vector.
template <class T>
using Lane = std::conditional_t<std::is_same_v<T, double>, uint64_t, uint32_t>;

// Ones for the entry j of a group if it is stepped, else zeros.
template <class Lane>
Lane mask_of(Lane kept, Lane j) {
  return -(kept >> j & 1);
}

// mask ? yes : no, by bit operations. A conditional expression becomes masked loads, and those, of memory that is not
// in a cache, made Adam's step take 2.3 times as long (Zen 5).
template <class T>
T select(Lane<T> mask, T yes, T no) {
  return std::bit_cast<T>((std::bit_cast<Lane<T>>(yes) & mask) | (std::bit_cast<Lane<T>>(no) & ~mask));
}

// Each entry of a group is computed, and others' are rewritten with their own bits.
template <class Acc>
struct SgdStep {
  Acc lr, momentum, weight_decay;
  Lane<Acc> decays, nesterov;  // ones if it does, else zeros

  explicit SgdStep(const Sgd& sgd)
      : lr(static_cast<Acc>(sgd.lr)),
        momentum(static_cast<Acc>(sgd.momentum)),
        weight_decay(static_cast<Acc>(sgd.weight_decay)),
        decays(-Lane<Acc>{sgd.weight_decay != 0}),
        nesterov(-Lane<Acc>{sgd.nesterov}) {}

  __attribute__((always_inline)) void group(Lane<Acc> kept, const Acc* g, std::array<Acc*, 1> written) const {
    Acc* const p = written[0];
#pragma GCC ivdep
    for (Lane<Acc> j = 0; j < kGroup; ++j) {
      // Without decay an infinite parameter must not make its gradient NaN.
      const Acc grad = select(decays, g[j] + weight_decay * p[j], g[j]);
      p[j] = select(mask_of(kept, j), p[j] - lr * grad, p[j]);
    }
  }

  __attribute__((always_inline)) void group(Lane<Acc> kept, const Acc* g, std::array<Acc*, 2> written) const {
    Acc* const p = written[0];
    Acc* const buffer = written[1];
#pragma GCC ivdep
    for (Lane<Acc> j = 0; j < kGroup; ++j) {
      const Acc grad = select(decays, g[j] + weight_decay * p[j], g[j]);
      const Acc velocity = momentum * buffer[j] + grad;
      const Acc direction = select(nesterov, grad + momentum * velocity, velocity);
      buffer[j] = select(mask_of(kept, j), velocity, buffer[j]);
      p[j] = select(mask_of(kept, j), p[j] - lr * direction, p[j]);
    }
  }
};

template <class Acc>
struct AdamStep {
  Acc step_size, lerp, beta2, square, inverse_correction, eps, weight_decay, shrink;
  Lane<Acc> decays;

  explicit AdamStep(const Adam& adam) {
    const double correction1 = 1 - std::pow(adam.beta1, static_cast<double>(adam.step));
    const double correction2 = 1 - std::pow(adam.beta2, static_cast<double>(adam.step));
    step_size = static_cast<Acc>(adam.lr / correction1);
    lerp = static_cast<Acc>(1 - adam.beta1);
    beta2 = static_cast<Acc>(adam.beta2);
    square = static_cast<Acc>(1 - adam.beta2);
    inverse_correction = static_cast<Acc>(1 / std::sqrt(correction2));
    eps = static_cast<Acc>(adam.eps);
    weight_decay = static_cast<Acc>(adam.decoupled ? 0 : adam.weight_decay);
    decays = -Lane<Acc>{weight_decay != 0};
    shrink = static_cast<Acc>(adam.decoupled ? 1 - adam.lr * adam.weight_decay : 1);
  }

  __attribute__((always_inline)) void group(Lane<Acc> kept, const Acc* g, std::array<Acc*, 3> written) const {
    Acc* const p = written[0];
    Acc* const exp_avg = written[1];
    Acc* const exp_avg_sq = written[2];
#pragma GCC ivdep
    for (Lane<Acc> j = 0; j < kGroup; ++j) {
      const Acc grad = select(decays, g[j] + weight_decay * p[j], g[j]);
      const Acc mean = exp_avg[j] + lerp * (grad - exp_avg[j]);
      const Acc variance = beta2 * exp_avg_sq[j] + square * grad * grad;
      const Acc denominator = std::sqrt(variance) * inverse_correction + eps;
      const Acc next = shrink * p[j] - step_size * mean / denominator;
      p[j] = select(mask_of(kept, j), next, p[j]);
      exp_avg[j] = select(mask_of(kept, j), mean, exp_avg[j]);
      exp_avg_sq[j] = select(mask_of(kept, j), variance, exp_avg_sq[j]);
    }
  }
};

inline void widen_group(const bfloat16* group, float* wide) {
  for (int64_t j = 0; j < kGroup; ++j) wide[j] = std::bit_cast<float>(uint32_t{group[j].bits} << 16);
}

// Selects once more: a NaN on its way through float32 does not keep its bits.
inline void narrow_group(const float* wide, uint32_t kept, bfloat16* group) {
  for (uint32_t j = 0; j < kGroup; ++j) {
    const uint32_t mask = mask_of(kept, j);
    group[j].bits = static_cast<uint16_t>((to_bfloat16(wide[j]).bits & mask) | (group[j].bits & ~mask));
  }
}

// written: the parameter and its state. n is a multiple of kGroup.
template <class T, size_t N, class Step>
__attribute__((always_inline)) inline void step_groups(std::array<T*, N> written, const T* grad, const Bits* kept,
                                                       int64_t n, const Step& step) {
  for (int64_t start = 0; start < n; start += kGroup) {
    __builtin_prefetch(grad + start + kAhead / sizeof(T));
    for (T* pointer : written) __builtin_prefetch(pointer + start + kAhead / sizeof(T), 1);
    const uint32_t mask = kept[start / kGroup];
    if (mask == 0) continue;
    std::array<T*, N> at = written;
    for (T*& pointer : at) pointer += start;
    if constexpr (std::is_same_v<T, bfloat16>) {
      float wide_grad[kGroup], wide[N][kGroup];
      std::array<float*, N> pointers;
      widen_group(grad + start, wide_grad);
      for (size_t i = 0; i < N; ++i) {
        pointers[i] = wide[i];
        widen_group(at[i], wide[i]);
      }
      step.group(mask, wide_grad, pointers);
      for (size_t i = 0; i < N; ++i) narrow_group(wide[i], mask, at[i]);
    } else {
      step.group(mask, grad + start, at);
    }
  }
}

#define PARTKERNELS_STEP(T, N, Step)                                                                        \
  PARTKERNELS_CLONES void step_piece(std::array<T*, N> written, const T* grad, const Bits* kept, int64_t n, \
                                     const Step<Accumulator<T>>& step) {                                    \
    step_groups(written, grad, kept, n, step);                                                              \
  }
#define PARTKERNELS_STEPS(T) \
  PARTKERNELS_STEP(T, 1, SgdStep) PARTKERNELS_STEP(T, 2, SgdStep) PARTKERNELS_STEP(T, 3, AdamStep)

PARTKERNELS_STEPS(float)
PARTKERNELS_STEPS(double)
PARTKERNELS_STEPS(bfloat16)

// How the entries of a row lie in memory.
enum class Order {
  columns,    // one after another in the order of the map's columns: linear and channels_last weights
  taps,       // one after another, the taps of a channel together: a contiguous convolution's
  scattered,  // neither
};

template <class T>
bool has_order(const Weight<T>& w, Order order) {
  const auto fits = [](int64_t size, int64_t stride, int64_t expected) { return size == 1 || stride == expected; };
  const int64_t innermost = order == Order::columns ? w.in : 1;
  return fits(w.in, w.in_stride, order == Order::columns ? 1 : w.height * w.width) &&
         fits(w.width, w.x_stride, innermost) && fits(w.height, w.y_stride, innermost * w.width);
}

// The tensors of a step.
template <class T, size_t N>
struct Tensors {
  std::array<Weight<T>, N> written;
  Weight<const T> grad;

  Order order() const {
    for (const Order order : {Order::columns, Order::taps}) {
      const auto has = [order](const auto& weight) { return has_order(weight, order); };
      if (has(grad) && std::all_of(written.begin(), written.end(), has)) return order;
    }
    return Order::scattered;
  }
};

// Steps n entries of a row, at most kPiece, that lie anywhere: through buffers.
template <class T, size_t N, class Step>
void step_scattered(const Tensors<T, N>& tensors, int64_t row, int64_t col, int64_t n, const Bits* kept,
                    const Step& step) {
  const int64_t padded = groups_of(n) * kGroup;
  const auto is_kept = [kept](int64_t j) { return kept[j / kGroup] >> j % kGroup & 1; };
  T grad[kPiece], values[N][kPiece];
  std::fill_n(grad, padded, T{});
  for_each_entry(tensors.grad, row, col, n, [&](int64_t j, const T* entry) {
    if (is_kept(j)) grad[j] = *entry;
  });
  std::array<T*, N> pointers;
  for (size_t i = 0; i < N; ++i) {
    pointers[i] = values[i];
    std::fill_n(values[i], padded, T{});
    for_each_entry(tensors.written[i], row, col, n, [&](int64_t j, T* entry) {
      if (is_kept(j)) values[i][j] = *entry;
    });
  }
  step_piece(pointers, grad, kept, padded, step);
  for (size_t i = 0; i < N; ++i) {
    for_each_entry(tensors.written[i], row, col, n, [&](int64_t j, T* entry) {
      if (is_kept(j)) *entry = values[i][j];
    });
  }
}

// Steps n entries of a row that lie one after another, from the entry `start` on in memory's order.
template <class T, size_t N, class Step>
void step_contiguous(const Tensors<T, N>& tensors, int64_t row, int64_t start, int64_t n, const Bits* kept,
                     const Step& step) {
  const auto as_row = [&](auto weight) {
    return decltype(weight){weight.data + row * weight.row_stride + start, 1, n, 1, 1, n, 1, 0, 0};
  };
  Tensors<T, N> run{{}, as_row(tensors.grad)};
  std::array<T*, N> pointers;
  for (size_t i = 0; i < N; ++i) {
    run.written[i] = as_row(tensors.written[i]);
    pointers[i] = run.written[i].data;
  }
  const int64_t whole = n / kGroup * kGroup;
  step_piece(pointers, run.grad.data, kept, whole, step);
  if (whole < n) step_scattered(run, 0, whole, n - whole, kept + whole / kGroup, step);
}

template <class T, size_t N, class Step>
void step_owned(const Tensors<T, N>& tensors, const Owners& owners, int partition, const Step& step,
                const ParallelFor& parallel_for) {
  const Weight<const T>& w = tensors.grad;
  const Order order = tensors.order();
  const int64_t cols = w.cols(), taps = w.height * w.width;
  const int64_t piece = order == Order::taps ? std::min(w.in, kPiece) * taps : kPiece;
  const int64_t pieces = (cols + piece - 1) / piece;
  const int64_t total = w.rows * pieces;
  const int64_t per_task = kEntriesPerTask / std::clamp(cols, int64_t{1}, std::min(piece, kEntriesPerTask));
  parallel_for((total + per_task - 1) / per_task, [&](int64_t begin, int64_t end) {
    std::vector<uint32_t> spare(order == Order::taps ? tap_words(taps) * kPiece : 0);
    std::vector<Bits> kept(groups_of(piece));
    for (int64_t index = begin * per_task; index < std::min(end * per_task, total); ++index) {
      const int64_t row = index / pieces, start = index % pieces * piece, n = std::min(piece, cols - start);
      if (owners.map == nullptr) {
        std::fill(kept.begin(), kept.end(), static_cast<Bits>(-1));
      } else if (order == Order::taps) {
        owned_taps(owners, row, w.in, taps, start / taps, n / taps, partition, spare.data(), kept.data());
      } else {
        owned_columns(owners, row, start, groups_of(n), partition, kept.data());
      }
      // What lies beyond the end belongs to nobody.
      if (n % kGroup != 0) kept[n / kGroup] &= static_cast<Bits>((1 << n % kGroup) - 1);
      if (order == Order::scattered) {
        step_scattered(tensors, row, start, n, kept.data(), step);
      } else {
        step_contiguous(tensors, row, start, n, kept.data(), step);
      }
    }
  });
}

}  // namespace

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

#define PARTKERNELS_INSTANTIATE(T)                                                                                   \
  template void sgd_step(Weight<T>, Weight<const T>, Weight<T>, const Owners&, int, const Sgd&, const ParallelFor&); \
  template void adam_step(Weight<T>, Weight<const T>, Weight<T>, Weight<T>, const Owners&, int, const Adam&,         \
                          const ParallelFor&);

PARTKERNELS_INSTANTIATE(float)
PARTKERNELS_INSTANTIATE(double)
PARTKERNELS_INSTANTIATE(bfloat16)

}  // namespace partkernels::cpu
