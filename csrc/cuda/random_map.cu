// The map of Partition.random: entries are ranked by (their Philox word, their index), and cut where partitions begin.
//
// The first entries of the partitions are found by radix selection: count the entries by a digit of their keys, choose
// in which of its values each boundary lies, and go on with the next digit of the entries that share what is known of
// it. Nothing is sorted or stored: each pass draws the words anew. Digits of the index are counted only if an entry
// before a boundary has the same word.
#include <algorithm>

#include "launch.h"
#include "layout.h"
#include "partkernels/packed_map.h"
#include "partkernels/philox.h"

namespace partkernels::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kMostBoundaries = kMaxPartitions - 1;
constexpr int kDigitBits = 11;
constexpr int kDigits = 1 << kDigitBits;

// The fourth counter word of a map's draws; ASCII "part", which keeps them apart from defaults.
constexpr uint32_t kDomain = 0x70617274;

// An entry's place in the order.
struct Key {
  uint32_t word;
  int64_t index;
};

PARTKERNELS_DEVICE bool is_before(const Key& a, const Key& b) {
  return a.word < b.word || (a.word == b.word && a.index < b.index);
}

PARTKERNELS_DEVICE Key key_of(int64_t index, uint64_t seed) {
  const auto counter = static_cast<uint64_t>(index);
  return {philox4x32(low_word(counter), high_word(counter), 0, kDomain, seed).word[0], index};
}

// Bits of a key: of the word, or of the index.
struct Digit {
  int low, bits;
  bool is_of_index;

  PARTKERNELS_DEVICE int of(const Key& key) const {
    const uint64_t part = is_of_index ? static_cast<uint64_t>(key.index) : key.word;
    return static_cast<int>(part >> low) & ((1 << bits) - 1);
  }
  // The key with 0 for this digit and those that follow.
  PARTKERNELS_DEVICE Key known(const Key& key) const {
    const int end = low + bits;
    if (is_of_index) return {key.word, key.index >> end << end};
    return {static_cast<uint32_t>(uint64_t{key.word} >> end << end), 0};
  }
  PARTKERNELS_DEVICE Key with(const Key& key, int digit) const {
    if (is_of_index) return {key.word, key.index | int64_t{digit} << low};
    return {key.word | static_cast<uint32_t>(digit) << low, 0};
  }
};

// Where a partition begins, so far: `rank` entries from the key on are still before it. With none, that is it.
struct Boundary {
  Key key;
  int64_t rank;
};

// The boundaries in their order, and for each the counts of a digit's values among the entries that share its known
// digits; of boundaries that share them too, the last one's are used.
struct State {
  Boundary* boundaries;
  uint64_t* counts;  // [count, kDigits]
  int count;

  // How many boundaries are at the key or before it.
  PARTKERNELS_DEVICE int before(const Key& key) const {
    int begin = 0, end = count;
    while (begin < end) {
      const int middle = (begin + end) / 2;
      if (is_before(key, boundaries[middle].key)) {
        end = middle;
      } else {
        begin = middle + 1;
      }
    }
    return begin;
  }
  PARTKERNELS_DEVICE uint64_t* counts_of(int boundary) const { return counts + int64_t{boundary} * kDigits; }
};

// A block's copy of the boundaries, in shared memory.
PARTKERNELS_DEVICE State near(const State& state) {
  auto* const boundaries = reinterpret_cast<Boundary*>(shared_memory());
  for (int j = thread_index(); j < state.count; j += kThreads) boundaries[j] = state.boundaries[j];
  synchronize_block();
  return {boundaries, state.counts, state.count};
}

struct Ranks {
  int64_t rank[kMostBoundaries];
};

PARTKERNELS_KERNEL void start(State state, PARTKERNELS_ARGUMENT Ranks ranks, int64_t entries) {
  const int j = block_index();
  const int64_t rank = ranks.rank[j];
  // The partitions after the last entry are empty.
  if (thread_index() == 0) {
    state.boundaries[j] = rank < entries ? Boundary{{0, 0}, rank} : Boundary{{UINT32_MAX, INT64_MAX}, 0};
  }
  for (int i = thread_index(); i < kDigits; i += kThreads) state.counts_of(j)[i] = 0;
}

// Nothing is known of the boundaries yet: counts all entries.
PARTKERNELS_KERNEL PARTKERNELS_BOUNDS(kThreads, 1) void count_all(State state, Digit digit, int64_t entries,
                                                                  uint64_t seed) {
  auto* const counts = reinterpret_cast<uint32_t*>(shared_memory());
  for (int i = thread_index(); i < kDigits; i += kThreads) counts[i] = 0;
  synchronize_block();
  const int64_t step = int64_t{blocks()} * kThreads;
  for (int64_t i = int64_t{block_index()} * kThreads + thread_index(); i < entries; i += step) {
    add_atomically(&counts[digit.of(key_of(i, seed))], uint32_t{1});
  }
  synchronize_block();
  const int last = state.before({0, 0}) - 1;
  if (last < 0) return;
  for (int i = thread_index(); i < kDigits; i += kThreads) {
    if (counts[i] != 0) add_atomically(&state.counts_of(last)[i], uint64_t{counts[i]});
  }
}

// Counts the entries that share the known digits of a boundary, which are few.
PARTKERNELS_KERNEL PARTKERNELS_BOUNDS(kThreads, 1) void count_some(State state, Digit digit, int64_t entries,
                                                                   uint64_t seed) {
  const State own = near(state);
  bool is_open = false;
  for (int j = 0; j < own.count; ++j) is_open |= own.boundaries[j].rank != 0;
  if (!is_open) return;
  const int64_t step = int64_t{blocks()} * kThreads;
  for (int64_t i = int64_t{block_index()} * kThreads + thread_index(); i < entries; i += step) {
    const Key key = key_of(i, seed), known = digit.known(key);
    const int last = own.before(known) - 1;
    if (last >= 0 && !is_before(own.boundaries[last].key, known)) {
      add_atomically(&own.counts_of(last)[digit.of(key)], uint64_t{1});
    }
  }
}

// A block for each boundary: finds its digit.
PARTKERNELS_KERNEL PARTKERNELS_BOUNDS(kThreads, 1) void choose(State from, State to, Digit digit) {
  constexpr int kOwn = kDigits / kThreads;
  const int j = block_index(), thread = thread_index();
  const Boundary boundary = from.boundaries[j];
  for (int i = thread; i < kDigits; i += kThreads) to.counts_of(j)[i] = 0;
  if (boundary.rank == 0) {
    if (thread == 0) to.boundaries[j] = boundary;
    return;
  }
  const uint64_t* const counts = from.counts_of(from.before(boundary.key) - 1) + thread * kOwn;
  int64_t sum = 0;
  for (int i = 0; i < kOwn; ++i) sum += static_cast<int64_t>(counts[i]);
  // sums[t]: of the threads up to t.
  auto* const sums = reinterpret_cast<int64_t*>(shared_memory());
  sums[thread] = sum;
  for (int distance = 1; distance < kThreads; distance *= 2) {
    synchronize_block();
    const int64_t before = thread < distance ? 0 : sums[thread - distance];
    synchronize_block();
    sums[thread] += before;
  }
  int64_t rank = boundary.rank - (sums[thread] - sum);
  if (rank < 0 || rank >= sum) return;
  int i = 0;
  for (; rank >= static_cast<int64_t>(counts[i]); ++i) rank -= static_cast<int64_t>(counts[i]);
  to.boundaries[j] = {digit.with(boundary.key, thread * kOwn + i), rank};
}

// A thread for each word of the map.
PARTKERNELS_KERNEL PARTKERNELS_BOUNDS(kThreads, 1) void write_map(State state, int64_t rows, int64_t cols, int bits,
                                                                  uint64_t seed, uint32_t* map) {
  const State own = near(state);
  const int64_t words = row_bytes(cols, bits) / 4, step = int64_t{blocks()} * kThreads;
  const int entries = 32 / bits;
  for (int64_t w = int64_t{block_index()} * kThreads + thread_index(); w < rows * words; w += step) {
    const int64_t row = w / words, col = w % words * entries;
    uint32_t word = 0;
    for (int i = 0; i < entries && col + i < cols; ++i) {
      word |= static_cast<uint32_t>(own.before(key_of(row * cols + col + i, seed))) << (i * bits);
    }
    map[w] = word;
  }
}

constexpr size_t state_bytes(int boundaries) {
  return static_cast<size_t>(boundaries) * (sizeof(Boundary) + sizeof(uint64_t) * kDigits);
}

State state_at(void* memory, int boundaries) {
  auto* const first = static_cast<Boundary*>(memory);
  return {first, reinterpret_cast<uint64_t*>(first + boundaries), boundaries};
}

}  // namespace

Status random_map(int64_t rows, int64_t cols, const int64_t* sizes, int parts, uint64_t seed, uint8_t* map,
                  void* workspace, Stream stream) {
  const int64_t entries = rows * cols;
  if (entries == 0) return {};
  Device device;
  if (const Status status = current_device(&device); !status) return status;
  const int boundaries = parts - 1, bits = bits_for(parts);
  const int most_blocks = 8 * device.multiprocessors;
  const auto over = [&](int64_t items, int shared_bytes) {
    return Launch{static_cast<int>(std::min<int64_t>(most_blocks, blocks_of(items, kThreads))), kThreads, shared_bytes};
  };
  const int own_bytes = static_cast<int>(sizeof(Boundary)) * boundaries;
  State now = state_at(workspace, boundaries);
  if (boundaries > 0) {
    State next = state_at(static_cast<char*>(workspace) + state_bytes(boundaries), boundaries);
    Ranks ranks = {};
    for (int j = 0; j < boundaries; ++j) ranks.rank[j] = (j == 0 ? 0 : ranks.rank[j - 1]) + sizes[j];
    const Launch each{boundaries, kThreads, static_cast<int>(sizeof(int64_t)) * kThreads};
    Status status = launch(start, each, stream, now, ranks, entries);
    const auto pass = [&](const Digit& digit, bool is_first) {
      if (status) {
        status = is_first ? launch(count_all, over(entries, 4 * kDigits), stream, now, digit, entries, seed)
                          : launch(count_some, over(entries, own_bytes), stream, now, digit, entries, seed);
      }
      if (status) status = launch(choose, each, stream, now, next, digit);
      std::swap(now, next);
    };
    pass({21, 11, false}, true);
    pass({10, 11, false}, false);
    pass({0, 10, false}, false);
    int low = 0;
    while ((entries - 1) >> low >> kDigitBits != 0) low += kDigitBits;
    for (; low >= 0; low -= kDigitBits) pass({low, kDigitBits, true}, false);
    if (!status) return status;
  }
  return launch(write_map, over(rows * (row_bytes(cols, bits) / 4), own_bytes), stream, now, rows, cols, bits, seed,
                reinterpret_cast<uint32_t*>(map));
}

size_t random_map_workspace(int parts) { return 2 * state_bytes(parts - 1); }

}  // namespace partkernels::cuda
