// The map of Partition.random.
#pragma once

#include "partkernels/packed_map.h"
#include "philox_lanes.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

// The fourth counter word of a map's draws: ASCII "part", which separates them from defaults.
constexpr uint32_t kDomain = 0x70617274;
constexpr int kHighBits = 16;

// The sort key of an entry: its word, then its index.
using Rank = std::pair<uint32_t, int64_t>;

// Calls use(index, word) for the entries [begin, end).
template <class Use>
void draw(int64_t begin, int64_t end, uint64_t seed, const Use& use) {
  for (int64_t start = begin / kLanes * kLanes; start < end; start += kLanes) {
    const auto index = static_cast<uint64_t>(start);
    uint32_t low[kLanes];
    for (uint32_t lane = 0; lane < kLanes; ++lane)
      low[lane] = low_word(index) + lane;  // a multiple of kLanes: no carry
    Lanes words[4];
    philox_lanes(column_part(load_lanes(low), 0, kDomain, seed), row_part(same_lanes(high_word(index)), 0, seed), seed,
                 words);
    uint32_t first[kLanes];
    store_lanes(words[0], first);
    const int64_t last = std::min<int64_t>(kLanes, end - start);
    for (int64_t lane = std::max<int64_t>(0, begin - start); lane < last; ++lane) use(start + lane, first[lane]);
  }
}

// Calls use(begin, end) for slices that cover [0, total), large compared with a histogram.
template <class Use>
void for_each_slice(int64_t total, const ParallelFor& parallel_for, const Use& use) {
  constexpr int64_t kSlice = int64_t{1} << 20;
  parallel_for((total + kSlice - 1) / kSlice,
               [&](int64_t begin, int64_t end) { use(begin * kSlice, std::min(total, end * kSlice)); });
}

inline std::vector<int64_t> histogram_of_high_bits(int64_t total, uint64_t seed, const ParallelFor& parallel_for) {
  std::vector<int64_t> histogram(1 << kHighBits);
  std::mutex mutex;
  for_each_slice(total, parallel_for, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> own(histogram.size());
    draw(begin, end, seed, [&](int64_t, uint32_t word) { ++own[word >> (32 - kHighBits)]; });
    const std::lock_guard<std::mutex> lock(mutex);
    for (size_t bin = 0; bin < own.size(); ++bin) histogram[bin] += own[bin];
  });
  return histogram;
}

// The first entry of each partition after the first, by radix selection: counts the high bits, then sorts only the bins
// that contain a boundary.
inline std::vector<Rank> boundaries(int64_t total, const std::vector<int64_t>& sizes, uint64_t seed,
                                    const ParallelFor& parallel_for) {
  const std::vector<int64_t> histogram = histogram_of_high_bits(total, seed, parallel_for);
  std::vector<int64_t> before(histogram.size() + 1);
  std::partial_sum(histogram.begin(), histogram.end(), before.begin() + 1);

  std::vector<int64_t> ranks;  // of the boundaries
  for (size_t j = 0, rank = 0; j + 1 < sizes.size(); ++j) ranks.push_back(static_cast<int64_t>(rank += sizes[j]));
  const auto bin_of = [&](int64_t rank) {
    return std::upper_bound(before.begin(), before.end(), rank) - before.begin() - 1;
  };

  std::vector<bool> wanted(histogram.size());
  for (const int64_t rank : ranks) {
    if (rank < total) wanted[bin_of(rank)] = true;
  }
  std::vector<Rank> candidates;
  std::mutex mutex;
  for_each_slice(total, parallel_for, [&](int64_t begin, int64_t end) {
    std::vector<Rank> own;
    draw(begin, end, seed, [&](int64_t index, uint32_t word) {
      if (wanted[word >> (32 - kHighBits)]) own.emplace_back(word, index);
    });
    const std::lock_guard<std::mutex> lock(mutex);
    candidates.insert(candidates.end(), own.begin(), own.end());
  });
  std::sort(candidates.begin(), candidates.end());

  std::vector<Rank> result;
  for (const int64_t rank : ranks) {
    if (rank == total) {
      result.emplace_back(UINT32_MAX, INT64_MAX);  // after every entry: the following partitions are empty
      continue;
    }
    const auto bin = bin_of(rank);
    const Rank first_of_bin(static_cast<uint32_t>(bin) << (32 - kHighBits), 0);
    result.push_back(*(std::lower_bound(candidates.begin(), candidates.end(), first_of_bin) + (rank - before[bin])));
  }
  return result;
}

inline void random_map(int64_t rows, int64_t cols, const std::vector<int64_t>& sizes, uint64_t seed, uint8_t* map,
                       const ParallelFor& parallel_for) {
  const std::vector<Rank> first = boundaries(rows * cols, sizes, seed, parallel_for);
  const int bits = bits_for(static_cast<int>(sizes.size()));
  const int64_t stride = row_bytes(cols, bits);
  parallel_for(rows, [&](int64_t begin, int64_t end) {
    draw(begin * cols, end * cols, seed, [&](int64_t index, uint32_t word) {
      const auto id = std::upper_bound(first.begin(), first.end(), Rank(word, index)) - first.begin();
      const int64_t bit = index % cols * bits;
      map[index / cols * stride + bit / 8] |= static_cast<uint8_t>(id << (bit % 8));
    });
  });
}

}  // namespace partkernels::cpu::PARTKERNELS_ISA
