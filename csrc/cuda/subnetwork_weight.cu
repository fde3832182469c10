// Materialises the weight of a subnetwork, or its rows for given ids, or masks its gradient, in one pass over memory.
//
// A quad of threads rebuilds 64 columns of a row in registers, as for a tensor core: one Philox call gives a thread's
// 16 uniform defaults. If rows are contiguous in the map's order, a quad reads and writes whole sectors of 32 bytes.
// Otherwise it takes the channels of one tap, entry by entry, and neighbouring quads take the other taps, which may
// share the same sectors. A thread issues all of its reads before it computes.
#include "launch.h"
#include "rebuild.h"
#include "weight_layout.h"

namespace partkernels::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kQuads = kThreads / kQuad;

template <class T>
struct Pass {
  Weight<const T> weight, stored;  // from out's first entry on
  Weight<T> out;
  Owners owners;    // from out's first row on
  int first, last;  // partitions in which the weight's entries are kept
  Threshold from_first, beyond_last;
  DefaultKind kind;
  Defaults defaults;
  int64_t first_row, first_in, in;  // out's begin in the map, and the map's channels per tap
  int64_t spans;                    // groups of 64 columns that contain out's channels of a tap
  const int64_t* ids;               // the weight's row for each row of out; null if they are the same
};

// Masks of a thread's pairs: all ones for an entry that is not the weight's.
template <class T>
PARTKERNELS_DEVICE void other_pairs(const Pass<T>& p, int64_t row, int64_t group, int q, uint32_t (&mask)[kPairs]) {
  PARTKERNELS_UNROLL
  for (int j = 0; j < kPairs; ++j) mask[j] = 0;
  const int bits = p.owners.bits;
  if (p.first == 1 && p.last >= 1 << bits) return;
  const uint8_t* const ids = p.owners.map + row * p.owners.row_bytes;
  const uint8_t* const words = ids + group * 8 * bits;
  // Rows are padded to 16 bytes, the size of a group with 2 bits per entry. With more bits, the last row may end before
  // its last group does.
  const int64_t cols = p.in * p.out.height * p.out.width;
  if (bits <= 2 || (group + 1) * kGroup <= cols) {
    dead_pairs(words, bits, q, p.beyond_last, mask);
    if (p.first > 1) {
      uint32_t reached[kPairs];
      dead_pairs(words, bits, q, p.from_first, reached);
      PARTKERNELS_UNROLL
      for (int j = 0; j < kPairs; ++j) mask[j] |= ~reached[j];
    }
    return;
  }
  PARTKERNELS_UNROLL
  for (int j = 0; j < kPairs; ++j) {
    for (int e = 0; e < 2; ++e) {
      const int64_t col = group * kGroup + 8 * j + 2 * q + e;
      const int partition = col < cols ? id_at(ids, col, bits) + 1 : p.first;
      if (partition < p.first || partition > p.last) mask[j] |= 0xFFFFu << (16 * e);
    }
  }
}

// A thread's defaults, as pairs of bfloat16 or float16.
template <class T>
PARTKERNELS_DEVICE void drawn_pairs(const Pass<T>& p, int64_t row, int64_t group, int q, uint32_t (&pair)[kPairs]) {
  using Pair = std::conditional_t<std::is_same_v<T, float16>, float16, bfloat16>;
  switch (p.kind) {
    case DefaultKind::uniform:
      return default_pairs<Pair, DefaultKind::uniform>(p.defaults, row, group, q, pair);
    case DefaultKind::normal:
      return default_pairs<Pair, DefaultKind::normal>(p.defaults, row, group, q, pair);
    default:
      return default_pairs<Pair, DefaultKind::zeros>(p.defaults, row, group, q, pair);
  }
}

// Exchanges pairs between neighbouring lanes: from two pairs that are 8 columns apart to four adjacent entries, in the
// first 8 columns for even lanes and in the second 8 for odd lanes.
PARTKERNELS_DEVICE void gather_pairs(int q, uint32_t (&pair)[kPairs]) {
  const bool is_odd = q % 2 != 0;
  PARTKERNELS_UNROLL
  for (int j = 0; j < kPairs; j += 2) {
    const uint32_t received = from_neighbour_lane(is_odd ? pair[j] : pair[j + 1]);
    pair[j] = is_odd ? received : pair[j];
    pair[j + 1] = is_odd ? pair[j + 1] : received;
  }
}

// The words of a pair of T, from a pair of 16-bit defaults or masks.
template <class T>
PARTKERNELS_DEVICE void widen_defaults(uint32_t pair, uint32_t (&words)[sizeof(T) / 2]) {
  const uint32_t parts[2] = {pair << 16, pair & 0xFFFF0000};
  if constexpr (sizeof(T) == 2) {
    words[0] = pair;
  } else if constexpr (sizeof(T) == 4) {
    words[0] = parts[0];
    words[1] = parts[1];
  } else {
    PARTKERNELS_UNROLL
    for (int e = 0; e < 2; ++e) {
      const double value = float_from_bits(parts[e]);
      memcpy(&words[2 * e], &value, sizeof(value));
    }
  }
}
template <class T>
PARTKERNELS_DEVICE void widen_mask(uint32_t pair, uint32_t (&words)[sizeof(T) / 2]) {
  if constexpr (sizeof(T) == 2) {
    words[0] = pair;
  } else {
    constexpr int kHalf = sizeof(T) / 4;
    PARTKERNELS_UNROLL
    for (int i = 0; i < kHalf; ++i) {
      words[i] = select_bytes(pair, 0, 0x1010);
      words[kHalf + i] = select_bytes(pair, 0, 0x3232);
    }
  }
}

// A thread's entries of 64 columns, as vectors of words: pair by pair; or, for 16-bit entries accessed as vectors, in
// the order of gather_pairs.
template <class T, bool kVectors>
struct Entries {
  static constexpr int kPairWords = sizeof(T) / 2;
  static constexpr int kWords = sizeof(T) == 8 ? 4 : 2;
  static constexpr int kCount = kPairs * kPairWords / kWords;
  static constexpr bool kIsGathered = kVectors && sizeof(T) == 2;

  uint32_t vector[kCount][kWords];

  PARTKERNELS_DEVICE uint32_t& word(int pair, int i) {
    return vector[(pair * kPairWords + i) / kWords][(pair * kPairWords + i) % kWords];
  }

  // The columns [begin, end) of a group, which begins at `group`, a stride apart.
  PARTKERNELS_DEVICE void load(const T* group, int64_t stride, int begin, int end, int q) {
    if constexpr (kVectors) {
      const int first = first_column(q);
      PARTKERNELS_UNROLL
      for (int v = 0; v < kCount; ++v) {
        const auto* const words = reinterpret_cast<const uint32_t*>(group + first) + words_of(v);
        if (first + step_of(v) < end) load_words(words, vector[v]);
      }
    } else {
      for_each(begin, end, q, [&](int col, int pair, int e) {
        const T entry = group[col * stride];
        if constexpr (sizeof(T) == 2) {
          word(pair, 0) |= uint32_t{entry.bits} << (16 * e);
        } else {
          memcpy(&word(pair, e * kPairWords / 2), &entry, sizeof(T));
        }
      });
    }
  }

  PARTKERNELS_DEVICE void store(T* group, int64_t stride, int begin, int end, int q) {
    if constexpr (kVectors) {
      const int first = first_column(q);
      PARTKERNELS_UNROLL
      for (int v = 0; v < kCount; ++v) {
        auto* const words = reinterpret_cast<uint32_t*>(group + first) + words_of(v);
        if (first + step_of(v) < end) store_words(words, vector[v]);
      }
    } else {
      for_each(begin, end, q, [&](int col, int pair, int e) {
        T entry;
        if constexpr (sizeof(T) == 2) {
          entry.bits = static_cast<uint16_t>(word(pair, 0) >> (16 * e));
        } else {
          memcpy(&entry, &word(pair, e * kPairWords / 2), sizeof(T));
        }
        group[col * stride] = entry;
      });
    }
  }

 private:
  // The first column of a thread's vectors, and the distance of vector v from the first in columns and in words.
  static PARTKERNELS_DEVICE int first_column(int q) { return kIsGathered ? 8 * (q % 2) + 4 * (q / 2) : 2 * q; }
  static PARTKERNELS_DEVICE int step_of(int v) { return (kIsGathered ? 16 : 8) * v; }
  static PARTKERNELS_DEVICE int words_of(int v) { return step_of(v) * static_cast<int>(sizeof(T)) / 4; }

  template <class Use>
  static PARTKERNELS_DEVICE void for_each(int begin, int end, int q, const Use& use) {
    PARTKERNELS_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      PARTKERNELS_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int col = 8 * pair + 2 * q + e;
        if (col >= begin && col < end) use(col, pair, e);
      }
    }
  }
};

// Blocks per multiprocessor: the most for which no registers are spilled.
template <class T, bool kVectors>
constexpr int kBlocks = sizeof(T) == 8 ? 4 : (kVectors ? 8 : 6);

template <class T, bool kVectors>
PARTKERNELS_KERNEL PARTKERNELS_BOUNDS(kThreads, (kBlocks<T, kVectors>)) void rebuild(PARTKERNELS_ARGUMENT Pass<T> p) {
  const int q = thread_index() % kQuad;
  const int64_t taps = kVectors ? 1 : p.out.height * p.out.width;
  const int64_t quad = int64_t{block_index()} * kQuads + thread_index() / kQuad;
  const int64_t tap = quad % taps, span = quad / taps % p.spans, row = quad / taps / p.spans;
  const int64_t start = tap * p.in + p.first_in;  // the column of out's first channel of the tap
  const int64_t group = start / kGroup + span, channel = group * kGroup - start;  // of the group's first column
  const int begin = channel < 0 ? static_cast<int>(-channel) : 0;
  // A quad beyond the end still runs, since lanes exchange defaults, but accesses no memory.
  const bool is_there = row < p.out.rows;
  const int64_t named = is_there && p.ids != nullptr ? p.ids[row] : row;
  const int64_t left = is_there ? p.out.in - channel : 0;
  const int end = left < kGroup ? static_cast<int>(left) : kGroup;
  const auto entry_of = [&](const auto& w, int64_t row) {
    auto* const run = w.data + row * w.row_stride + channel * w.in_stride;
    return kVectors ? run : run + tap / p.out.width * w.y_stride + tap % p.out.width * w.x_stride;
  };

  using Own = Entries<T, kVectors>;
  Own entries = {};
  entries.load(entry_of(p.weight, named), p.weight.in_stride, begin, end, q);

  uint32_t mask[kPairs] = {};
  if (end > 0) other_pairs(p, named, group, q, mask);
  if constexpr (Own::kIsGathered) gather_pairs(q, mask);

  Own others = {};
  if (p.kind == DefaultKind::stored) {
    others.load(entry_of(p.stored, named), p.stored.in_stride, begin, end, q);
  } else {
    uint32_t pair[kPairs];
    drawn_pairs(p, p.first_row + named, group, q, pair);
    if constexpr (Own::kIsGathered) gather_pairs(q, pair);
    PARTKERNELS_UNROLL
    for (int j = 0; j < kPairs; ++j) {
      uint32_t words[Own::kPairWords];
      widen_defaults<T>(pair[j], words);
      PARTKERNELS_UNROLL
      for (int i = 0; i < Own::kPairWords; ++i) others.word(j, i) = words[i];
    }
  }

  PARTKERNELS_UNROLL
  for (int j = 0; j < kPairs; ++j) {
    uint32_t is_other[Own::kPairWords];
    widen_mask<T>(mask[j], is_other);
    PARTKERNELS_UNROLL
    for (int i = 0; i < Own::kPairWords; ++i) {
      entries.word(j, i) = select_bits(is_other[i], others.word(j, i), entries.word(j, i));
    }
  }
  entries.store(entry_of(p.out, row), p.out.in_stride, begin, end, q);
}

// Whether rows are contiguous in the map's order and aligned for vector accesses.
template <class T>
bool takes_vectors(const Weight<T>& w) {
  constexpr int64_t kBytes = sizeof(T) == 8 ? 16 : 8, kEntries = kBytes / static_cast<int64_t>(sizeof(T));
  return rows_are_contiguous(w) && reinterpret_cast<uintptr_t>(w.data) % kBytes == 0 &&
         (w.row_stride % kEntries == 0 || w.rows == 1) && w.in % kEntries == 0;
}

template <class T>
Status run(Pass<T> p, Stream stream) {
  if (p.out.rows == 0 || p.out.cols() == 0) return {};
  const bool is_stored = p.kind == DefaultKind::stored;
  if (p.out.in == p.in && rows_are_contiguous(p.weight) && rows_are_contiguous(p.out) &&
      (!is_stored || rows_are_contiguous(p.stored))) {
    p.in = p.out.cols();
    p.weight = as_linear(p.weight);
    p.out = as_linear(p.out);
    if (is_stored) p.stored = as_linear(p.stored);
  }
  const int64_t taps = p.out.height * p.out.width;
  const bool is_aligned = p.first_in % kGroup == 0 && (p.in % kGroup == 0 || taps == 1);
  p.spans = blocks_of(is_aligned ? p.out.in : p.out.in + kGroup - 1, kGroup);
  p.from_first = threshold(p.owners.bits, p.first - 1);
  p.beyond_last = threshold(p.owners.bits, p.last);
  // Far fewer than 2^31 blocks: each has at least 64 entries, and they fit in memory.
  const Launch how{static_cast<int>(blocks_of(p.out.rows * taps * p.spans, kQuads)), kThreads};
  const bool is_vectored = is_aligned && taps == 1 && takes_vectors(p.weight) && takes_vectors(p.out) &&
                           (!is_stored || takes_vectors(p.stored));
  return is_vectored ? launch(rebuild<T, true>, how, stream, p) : launch(rebuild<T, false>, how, stream, p);
}

// The pass that rebuilds out's part of a subnetwork's weight.
template <class T>
Pass<T> rebuilding(const Subnetwork<T>& w, int64_t first_row, int64_t first_in, const Weight<T>& out) {
  const auto part_of = [&](Weight<const T> whole) {
    if (whole.data != nullptr) whole.data += first_row * whole.row_stride + first_in * whole.in_stride;
    whole.rows = out.rows;
    whole.in = out.in;
    return whole;
  };
  Pass<T> p = {};
  p.weight = part_of(w.weight);
  p.out = out;
  p.owners = w.owners;
  p.owners.map += first_row * w.owners.row_bytes;
  p.first = 1;
  // If all partitions are active, the map is not read.
  const bool is_all = w.active == w.count;
  p.last = is_all ? kMaxPartitions : w.active;
  p.kind = is_all ? DefaultKind::zeros : w.defaults.kind;
  if (p.kind == DefaultKind::stored) p.stored = part_of(w.stored);
  p.defaults = w.defaults;
  p.first_row = first_row;
  p.first_in = first_in;
  p.in = w.weight.in;
  return p;
}

}  // namespace

template <class T>
Status subnetwork_weight(const Subnetwork<T>& w, int64_t first_row, int64_t first_in, Weight<T> out, Stream stream) {
  return run(rebuilding(w, first_row, first_in, out), stream);
}

template <class T>
Status embedding(const int64_t* ids, int64_t count, const Subnetwork<T>& w, T* out, Stream stream) {
  const int64_t cols = w.weight.cols();
  Pass<T> p = rebuilding(w, 0, 0, Weight<T>{out, count, cols, 1, 1, cols, 1, 0, 0});
  p.ids = ids;
  p.weight.rows = p.stored.rows = w.weight.rows;  // their strides are used even for a single id
  return run(p, stream);
}

template <class T>
Status subnetwork_weight_grad(Weight<const T> grad, Owners owners, int first, int last, Weight<T> out, Stream stream) {
  Pass<T> p = {};
  p.weight = grad;
  p.out = out;
  p.owners = owners;
  p.first = first;
  p.last = last;
  p.kind = DefaultKind::zeros;
  p.in = out.in;
  return run(p, stream);
}

#define PARTKERNELS_INSTANTIATE(T)                                                              \
  template Status subnetwork_weight(const Subnetwork<T>&, int64_t, int64_t, Weight<T>, Stream); \
  template Status subnetwork_weight_grad(Weight<const T>, Owners, int, int, Weight<T>, Stream); \
  template Status embedding(const int64_t*, int64_t, const Subnetwork<T>&, T*, Stream);

PARTKERNELS_INSTANTIATE(float)
PARTKERNELS_INSTANTIATE(double)
PARTKERNELS_INSTANTIATE(bfloat16)
PARTKERNELS_INSTANTIATE(float16)

}  // namespace partkernels::cuda
