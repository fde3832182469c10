// An optimiser step for the entries of one partition, in one pass: parameter, gradient and state are read only in words
// that contain an entry of the partition, and only its entries are written.
//
// The threads of a warp have neighbouring words of 4 bytes (double: 8), so that their writes to a sector are combined
// into one. With vectors of 16 bytes per thread, written entry by entry, up to eight would be needed.
//
// Small tensors share launches: the kernel's arguments describe several of them.
#include <algorithm>
#include <utility>

#include "launch.h"
#include "partkernels/packed_map.h"
#include "weight_layout.h"

namespace partkernels::cuda {

namespace {

constexpr int kThreads = 128;

template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Takes an entry's gradient and updates the parameter and its state. Roundings are explicit and not left to the
// compiler, which chose differently in the kernel for several tensors than in the kernel for one.
template <class Acc, bool kHasMomentum>
struct SgdStep {
  static constexpr int kWritten = kHasMomentum ? 2 : 1;
  SgdFactors<Acc> by;

  PARTKERNELS_DEVICE void operator()(Acc grad, Acc (&written)[kWritten]) const {
    Acc& p = written[0];
    if (by.decays) grad = multiply_add(by.weight_decay, p, grad);
    if constexpr (kHasMomentum) {
      Acc& buffer = written[1];
      buffer = multiply_add(by.momentum, buffer, grad);
      grad = by.nesterov ? multiply_add(by.momentum, buffer, grad) : buffer;
    }
    p = multiply_add(-by.lr, grad, p);
  }
};

template <class Acc>
struct AdamStep {
  static constexpr int kWritten = 3;
  AdamFactors<Acc> by;

  PARTKERNELS_DEVICE void operator()(Acc grad, Acc (&written)[kWritten]) const {
    auto& [p, exp_avg, exp_avg_sq] = written;
    if (by.decays) grad = multiply_add(by.weight_decay, p, grad);
    exp_avg = multiply_add(by.lerp, grad - exp_avg, by.is_near_grad ? grad : exp_avg);
    exp_avg_sq = multiply_add(by.beta2, exp_avg_sq, by.square * grad * grad);
    const Acc denominator = multiply_add(square_root(exp_avg_sq), by.inverse_correction, by.eps);
    p = multiply_add(by.shrink, p, -divide(by.step_size * exp_avg, denominator));
  }
};

// The position of a word's first entry.
struct Place {
  int64_t row, channel, tap;
};

// Entries of a row that are contiguous, in the order of the map's columns or in that of a contiguous convolution weight
// (channel by channel, with the taps of a channel together), are visited in the order of memory. In the first case, a
// row is treated as cols channels with one tap. Other rows are visited in the order of the map's columns.
template <class T, class Step>
struct Tensors {
  Weight<T> written[Step::kWritten];  // the parameter and its state
  Weight<const T> grad;
  Owners owners;
  int partition;
  Step step;
  Place a_block;  // distance between a thread's words
};

// The tensors of a launch; the blocks of each begin where those before it end.
template <class T, class Step, int kTensors>
struct Several {
  Tensors<T, Step> each[kTensors];
  int first_block[kTensors];
};
// The number of tensors that fit into 4 KB, the limit of a kernel's arguments.
template <class T, class Step>
constexpr int kMost = 4096 / sizeof(Several<T, Step, 1>);
// For a tensor with more entries, the kernel takes longer than its launch: 7 us, for 28 bytes per entry at 4 TB/s.
constexpr int64_t kFew = 1 << 20;

// The number of entries that a thread accesses at once: one, or two adjacent ones of 16 bits.
template <class T, bool kScattered>
constexpr int kEntries = sizeof(T) == 2 && !kScattered ? 2 : 1;
template <class T, bool kScattered>
using Word = std::conditional_t<kEntries<T, kScattered> == 2, uint32_t, T>;
// Words per thread, loaded at the same time.
template <bool kScattered>
constexpr int kWords = kScattered ? 1 : 4;

template <class T>
PARTKERNELS_DEVICE Accumulator<T> widen(T value) {
  if constexpr (sizeof(T) == 2) {
    return as_float(value);
  } else {
    return value;
  }
}

template <class Own, class T>
PARTKERNELS_DEVICE Own load(const T* from) {
  if constexpr (std::is_same_v<Own, T>) {
    return *from;
  } else {
    uint32_t word[1];
    load_words(reinterpret_cast<const uint32_t*>(from), word);
    return word[0];
  }
}
template <class T, class Own>
PARTKERNELS_DEVICE T entry_of(Own word, int k) {
  if constexpr (std::is_same_v<Own, T>) {
    return word;
  } else {
    return T{static_cast<uint16_t>(word >> (16 * k))};
  }
}

template <bool kScattered, class T>
PARTKERNELS_DEVICE Place place_of(const Weight<T>& size, int64_t entry) {
  const int64_t taps = size.height * size.width, cols = size.in * taps, row = entry / cols, left = entry - row * cols;
  const int64_t minor = kScattered ? size.in : taps, major = left / minor, rest = left - major * minor;
  return kScattered ? Place{row, rest, major} : Place{row, major, rest};
}

// The place `by` further on, without a division.
template <class T>
PARTKERNELS_DEVICE Place further(const Weight<T>& size, const Place& place, const Place& by) {
  const int64_t taps = size.height * size.width;
  Place there = {place.row + by.row, place.channel + by.channel, place.tap + by.tap};
  if (there.tap >= taps) {
    there.tap -= taps;
    ++there.channel;
  }
  if (there.channel >= size.in) {
    there.channel -= size.in;
    ++there.row;
  }
  return there;
}

// The offset of a place in a tensor's memory.
template <bool kScattered, class T>
PARTKERNELS_DEVICE int64_t offset_of(const Weight<T>& w, const Place& place) {
  const int64_t row = place.row * w.row_stride;
  if constexpr (!kScattered) return row + place.channel * (w.height * w.width) + place.tap;
  const int64_t y = place.tap / w.width, x = place.tap - y * w.width;
  return row + place.channel * w.in_stride + y * w.y_stride + x * w.x_stride;
}

// Writes the stepped entries of a word.
template <class T, class Acc, int kCount, int kWritten>
PARTKERNELS_DEVICE void store(T* to, uint32_t owned, const Acc (&stepped)[kCount][kWritten], int i) {
  if constexpr (sizeof(T) > 2) {
    *to = stepped[0][i];
  } else {
    const uint32_t pair[1] = {pair_of<T>(stepped[0][i], stepped[kCount - 1][i])};
    if (kCount == 2 && owned == 3) return store_words(reinterpret_cast<uint32_t*>(to), pair);
    PARTKERNELS_UNROLL
    for (int k = 0; k < kCount; ++k) {
      if (owned >> k & 1) to[k] = entry_of<T>(pair[0], k);
    }
  }
}

template <class T, class Step, bool kScattered, int kTensors>
PARTKERNELS_KERNEL PARTKERNELS_BOUNDS(kThreads,
                                      1) void step_entries(PARTKERNELS_ARGUMENT Several<T, Step, kTensors> several) {
  constexpr int kCount = kEntries<T, kScattered>, kOwn = kWords<kScattered>, kWritten = Step::kWritten;
  using Own = Word<T, kScattered>;
  int own = 0;
  PARTKERNELS_UNROLL
  for (int i = 1; i < kTensors; ++i) own += block_index() >= several.first_block[i];
  const Tensors<T, Step>& tensors = several.each[own];
  const int block = block_index() - several.first_block[own];
  const Weight<const T>& size = tensors.grad;
  const int64_t taps = size.height * size.width;
  const Owners& owners = tensors.owners;

  // The bytes of the map that contain the entries' partitions, and the bit positions in them.
  Place place[kOwn];
  uint32_t ids[kOwn][kCount] = {}, shift[kOwn][kCount] = {};
  place[0] = place_of<kScattered>(size, (int64_t{block} * kOwn * kThreads + thread_index()) * kCount);
  PARTKERNELS_UNROLL
  for (int w = 0; w < kOwn; ++w) {
    if (w > 0) place[w] = further(size, place[w - 1], tensors.a_block);
    if (owners.map == nullptr || place[w].row >= size.rows) continue;
    Place entry = place[w];
    PARTKERNELS_UNROLL
    for (int k = 0; k < kCount; ++k) {
      const uint64_t bit = static_cast<uint64_t>(entry.tap * size.in + entry.channel) * owners.bits;
      ids[w][k] = owners.map[entry.row * owners.row_bytes + (bit >> 3)];
      shift[w][k] = bit & 7;
      if (++entry.tap == taps) {
        entry.tap = 0;
        ++entry.channel;
      }
    }
  }

  uint32_t owned[kOwn];  // bit k: whether the k-th entry of a word is stepped
  Own grad[kOwn], written[kOwn][kWritten];
  int64_t offset[kOwn][kWritten];
  PARTKERNELS_UNROLL
  for (int w = 0; w < kOwn; ++w) {
    owned[w] = 0;
    PARTKERNELS_UNROLL
    for (int k = 0; k < kCount; ++k) {
      const uint32_t id = ids[w][k] >> shift[w][k] & ((1u << owners.bits) - 1);
      const bool is_owned = owners.map == nullptr || id == static_cast<uint32_t>(tensors.partition - 1);
      if (is_owned && place[w].row < size.rows) owned[w] |= 1u << k;
    }
    if (owned[w] == 0) continue;
    const int64_t of_grad = offset_of<kScattered>(size, place[w]);
    grad[w] = load<Own>(tensors.grad.data + of_grad);
    PARTKERNELS_UNROLL
    for (int i = 0; i < kWritten; ++i) {
      offset[w][i] = kScattered ? offset_of<kScattered>(tensors.written[i], place[w]) : of_grad;
      written[w][i] = load<Own>(tensors.written[i].data + offset[w][i]);
    }
  }

  PARTKERNELS_UNROLL
  for (int w = 0; w < kOwn; ++w) {
    if (owned[w] == 0) continue;
    Accumulator<T> stepped[kCount][kWritten];
    PARTKERNELS_UNROLL
    for (int k = 0; k < kCount; ++k) {
      PARTKERNELS_UNROLL
      for (int i = 0; i < kWritten; ++i) stepped[k][i] = widen(entry_of<T>(written[w][i], k));
      tensors.step(widen(entry_of<T>(grad[w], k)), stepped[k]);
    }
    PARTKERNELS_UNROLL
    for (int i = 0; i < kWritten; ++i) {
      store(tensors.written[i].data + offset[w][i], owned[w], stepped, i);
    }
  }
}

// Whether a thread's words are aligned in rows with contiguous entries.
template <class T>
bool takes_words(const Weight<T>& w) {
  constexpr int64_t kCount = kEntries<std::remove_const_t<T>, false>;
  return reinterpret_cast<uintptr_t>(w.data) % (kCount * sizeof(T)) == 0 && w.cols() % kCount == 0 &&
         (w.row_stride % kCount == 0 || w.rows == 1);
}

// Treats tensors with contiguous rows as linear weights; returns whether the entries are scattered.
template <class T, class Step>
bool arrange(Tensors<T, Step>* tensors) {
  const auto all = [&](const auto& holds) {
    return holds(tensors->grad) && std::all_of(tensors->written, tensors->written + Step::kWritten, holds);
  };
  const int64_t row_stride = tensors->grad.row_stride;
  const bool is_scattered = !all([&](const auto& w) { return takes_words(w) && w.row_stride == row_stride; });
  if (all([](const auto& w) { return rows_are_contiguous(w); })) {
    tensors->grad = as_linear(tensors->grad);
    for (Weight<T>& w : tensors->written) w = as_linear(w);
    return is_scattered;
  }
  return is_scattered || !all([](const auto& w) { return taps_are_contiguous(w); });
}

// Collects tensors for a launch.
template <class T, class Step, bool kScattered>
class Launches {
 public:
  explicit Launches(Stream stream) : stream_(stream) {}

  Status add(Tensors<T, Step> tensors) {
    const Weight<const T>& size = tensors.grad;
    const int64_t taps = size.height * size.width, width = int64_t{kThreads} * kEntries<T, kScattered>;
    tensors.a_block = {width / size.cols(), width % size.cols() / taps, width % taps};
    // Far fewer than 2^31 blocks, since their entries fit in memory.
    const int64_t entries = size.rows * size.cols();
    const auto blocks = static_cast<int>(blocks_of(entries, width * kWords<kScattered>));
    if (entries > kFew) return step_one(tensors, blocks);
    several_.each[count_] = tensors;
    several_.first_block[count_++] = blocks_;
    blocks_ += blocks;
    return count_ == kMost<T, Step> ? flush() : Status{};
  }

  Status flush() {
    const int count = std::exchange(count_, 0), blocks = std::exchange(blocks_, 0);
    if (count == 0) return {};
    if (count == 1) return step_one(several_.each[0], blocks);
    std::fill(several_.first_block + count, std::end(several_.first_block), blocks);
    return launch(step_entries<T, Step, kScattered, kMost<T, Step>>, Launch{blocks, kThreads}, stream_, several_);
  }

 private:
  Status step_one(const Tensors<T, Step>& tensors, int blocks) const {
    const Several<T, Step, 1> one{{tensors}, {0}};
    return launch(step_entries<T, Step, kScattered, 1>, Launch{blocks, kThreads}, stream_, one);
  }

  Several<T, Step, kMost<T, Step>> several_{};
  int count_ = 0, blocks_ = 0;
  Stream stream_;
};

template <class T, class Step, class Each, class MakeTensors>
Status run(std::span<const Each> each, const MakeTensors& tensors_of, Stream stream) {
  Launches<T, Step, false> in_rows(stream);
  Launches<T, Step, true> scattered(stream);
  for (const Each& one : each) {
    if (one.grad.rows == 0 || one.grad.cols() == 0) continue;
    Tensors<T, Step> tensors = tensors_of(one);
    const Status status = arrange(&tensors) ? scattered.add(tensors) : in_rows.add(tensors);
    if (!status) return status;
  }
  const Status status = in_rows.flush();
  return status ? scattered.flush() : status;
}

}  // namespace

template <class T>
Status sgd_steps(std::span<const SgdTensors<T>> each, int update, const Sgd& sgd, Stream stream) {
  using Acc = Accumulator<T>;
  using Plain = SgdStep<Acc, false>;
  using WithMomentum = SgdStep<Acc, true>;
  const SgdFactors<Acc> by(sgd);
  if (sgd.momentum == 0) {
    const auto tensors = [&](const SgdTensors<T>& one) {
      return Tensors<T, Plain>{{one.parameter}, one.grad, one.owners, update, {by}, {}};
    };
    return run<T, Plain>(each, tensors, stream);
  }
  const auto tensors = [&](const SgdTensors<T>& one) {
    return Tensors<T, WithMomentum>{{one.parameter, one.momentum_buffer}, one.grad, one.owners, update, {by}, {}};
  };
  return run<T, WithMomentum>(each, tensors, stream);
}

template <class T>
Status adam_steps(std::span<const AdamTensors<T>> each, int update, const Adam& adam, Stream stream) {
  using Step = AdamStep<Accumulator<T>>;
  const auto tensors = [&](const AdamTensors<T>& one) {
    Adam own = adam;
    own.step = one.step;
    return Tensors<T, Step>{{one.parameter, one.exp_avg, one.exp_avg_sq}, one.grad, one.owners, update,
                            {AdamFactors<Accumulator<T>>(own)},           {}};
  };
  return run<T, Step>(each, tensors, stream);
}

template <class T>
Status sgd_step(Weight<T> parameter, Weight<const T> grad, Weight<T> momentum_buffer, const Owners& owners, int update,
                const Sgd& sgd, Stream stream) {
  const SgdTensors<T> one{parameter, grad, momentum_buffer, owners};
  return sgd_steps<T>({&one, 1}, update, sgd, stream);
}

template <class T>
Status adam_step(Weight<T> parameter, Weight<const T> grad, Weight<T> exp_avg, Weight<T> exp_avg_sq,
                 const Owners& owners, int update, const Adam& adam, Stream stream) {
  const AdamTensors<T> one{parameter, grad, exp_avg, exp_avg_sq, owners, adam.step};
  return adam_steps<T>({&one, 1}, update, adam, stream);
}

#define PARTKERNELS_INSTANTIATE(T)                                                                             \
  template Status sgd_step(Weight<T>, Weight<const T>, Weight<T>, const Owners&, int, const Sgd&, Stream);     \
  template Status adam_step(Weight<T>, Weight<const T>, Weight<T>, Weight<T>, const Owners&, int, const Adam&, \
                            Stream);                                                                           \
  template Status sgd_steps(std::span<const SgdTensors<T>>, int, const Sgd&, Stream);                          \
  template Status adam_steps(std::span<const AdamTensors<T>>, int, const Adam&, Stream);

PARTKERNELS_INSTANTIATE(float)
PARTKERNELS_INSTANTIATE(double)
PARTKERNELS_INSTANTIATE(bfloat16)
PARTKERNELS_INSTANTIATE(float16)

}  // namespace partkernels::cuda
