#include "owned.h"

#include <algorithm>
#include <cstring>

#include "isa.h"

namespace partkernels::cpu {
namespace {

// A field of bits, again and again from bit 0 on.
template <class Word>
constexpr Word repeated(uint64_t field, int period) {
  return static_cast<Word>(period < 64 ? field * (~uint64_t{0} / ((uint64_t{1} << period) - 1)) : field);
}

// The lowest bit of each id becomes 1 if any of its bits is.
template <int bits, int shift = bits / 2, class Word>
Word any_bit(Word word) {
  if constexpr (shift == 0)
    return word;
  else
    return any_bit<bits, shift / 2>(static_cast<Word>(word | word >> shift));
}

// The lowest bits of a word's ids move together: from n side by side to 2 n, and so on.
template <int bits, int n = 1, class Word>
Word compact(Word word) {
  if constexpr (n * bits >= 8 * static_cast<int>(sizeof(Word)))
    return word;
  else
    return compact<bits, 2 * n>(
        static_cast<Word>((word | word >> n * (bits - 1)) & repeated<Word>((1 << 2 * n) - 1, 2 * n * bits)));
}

// owned = which entries of these groups of a row of the map belong to partition id + 1; at most kPiece. A word of 16
// ids (8, of 8 bits) is compared at once, and the loop becomes vectors.
template <int bits, class Word, class Result>
__attribute__((always_inline)) inline void compare(const uint8_t* map, int id, int64_t groups, Bits* owned) {
  constexpr int64_t kPerGroup = sizeof(Bits) / sizeof(Result);
  const Word pattern = repeated<Word>(static_cast<uint64_t>(id), bits);
  Word words[kPiece / kGroup * kPerGroup];
  Result results[kPiece / kGroup * kPerGroup];
  std::memcpy(words, map, groups * kPerGroup * sizeof(Word));
  for (int64_t i = 0; i < groups * kPerGroup; ++i) {
    const Word differs = any_bit<bits>(static_cast<Word>(words[i] ^ pattern));
    results[i] = static_cast<Result>(compact<bits>(static_cast<Word>(~differs & repeated<Word>(1, bits))));
  }
  std::memcpy(owned, results, groups * sizeof(Bits));
}

// Appends bits to the bits of groups.
class BitWriter {
 public:
  explicit BitWriter(Bits* out) : out_(out) {}

  // At most 32 bits; the others of `bits` are 0.
  void append(uint32_t bits, int64_t count) {
    pending_ |= uint64_t{bits} << filled_;
    for (filled_ += count; filled_ >= kGroup; filled_ -= kGroup, pending_ >>= kGroup) {
      *out_++ = static_cast<Bits>(pending_);
    }
  }
  void finish() {
    if (filled_ > 0) *out_ = static_cast<Bits>(pending_);
  }

 private:
  Bits* out_;
  uint64_t pending_ = 0;
  int64_t filled_ = 0;
};

}  // namespace

PARTKERNELS_CLONES
void owned_columns(const Owners& owners, int64_t row, int64_t col, int64_t groups, int partition, Bits* bits) {
  const uint8_t* const map = owners.row(row) + col * owners.bits / 8;
  switch (owners.bits) {
    case 1:
      return compare<1, uint16_t, uint16_t>(map, partition - 1, groups, bits);
    case 2:
      return compare<2, uint32_t, uint16_t>(map, partition - 1, groups, bits);
    case 4:
      return compare<4, uint64_t, uint16_t>(map, partition - 1, groups, bits);
    default:
      return compare<8, uint64_t, uint8_t>(map, partition - 1, groups, bits);
  }
}

PARTKERNELS_CLONES
void owned_taps(const Owners& owners, int64_t row, int64_t in, int64_t taps, int64_t first, int64_t channels,
                int partition, uint32_t* spare, Bits* bits) {
  std::fill_n(spare, tap_words(taps) * kPiece, 0);
  for (int64_t tap = 0; tap < taps; ++tap) {
    uint8_t owned[kPiece];
    select_owners(owners, row, tap * in + first, channels, partition, partition, owned);
    uint32_t* const word = spare + tap / kTapsPerWord * kPiece;
    for (int64_t i = 0; i < channels; ++i) word[i] |= static_cast<uint32_t>(owned[i]) << tap % kTapsPerWord;
  }
  BitWriter writer(bits);
  for (int64_t i = 0; i < channels; ++i) {
    for (int64_t tap = 0; tap < taps; tap += kTapsPerWord) {
      writer.append(spare[tap / kTapsPerWord * kPiece + i], std::min(kTapsPerWord, taps - tap));
    }
  }
  writer.finish();
}

}  // namespace partkernels::cpu
