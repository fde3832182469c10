// Which entries of a row a partition owns, as bits.
#pragma once

#include <cstdint>

#include "partkernels/cpu.h"
#include "rebuild.h"

namespace partkernels::cpu {

// Entries that are stepped together, or skipped if none is owned: a cache line of float32.
constexpr int64_t kGroup = 16;
// Bit j is the entry j of a group.
using Bits = uint16_t;

constexpr int64_t groups_of(int64_t n) { return (n + kGroup - 1) / kGroup; }

// bits = which of the entries (row, col), (row, col + 1), ... a partition owns; col is a multiple of 16, and groups at
// most groups_of(kPiece): a row of the map is padded to whole groups. Beyond the weight's columns they are anything.
void owned_columns(const Owners& owners, int64_t row, int64_t col, int64_t groups, int partition, Bits* bits);

// The taps of a channel, in words.
constexpr int64_t kTapsPerWord = 32;
constexpr int64_t tap_words(int64_t taps) { return (taps + kTapsPerWord - 1) / kTapsPerWord; }

// As owned_columns, in another order: that of memory, where the taps of a channel lie together and the `in` channels
// follow one another. Of the channels first, first + 1, ...; at most kPiece. spare holds tap_words(taps) * kPiece.
void owned_taps(const Owners& owners, int64_t row, int64_t in, int64_t taps, int64_t first, int64_t channels,
                int partition, uint32_t* spare, Bits* bits);

}  // namespace partkernels::cpu
