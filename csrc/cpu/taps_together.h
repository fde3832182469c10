// Tap packing: reorders the bits of a convolution weight's mask into the memory order of a contiguous weight.
#pragma once

#include "isa.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

// The maximum number of taps.
constexpr int64_t kMaxTaps = 64;

// Reorders the bits of a row from the order of the map's columns, with input channels innermost, to that of a
// contiguous weight, with the taps of a channel together.
class TapsTogether {
 public:
  TapsTogether(int64_t in, int64_t taps) : in_(in), taps_(taps) {
    const int64_t some = channels_at_once(taps);
    for (uint64_t channels = 0; channels < uint64_t{1} << some; ++channels) {
      spread_[channels] = 0;
      for (int64_t i = 0; i < some; ++i) spread_[channels] |= (channels >> i & 1) << i * taps;
    }
  }

  // Reads one word of `columns` beyond the last.
  void operator()(const uint64_t* columns, uint64_t* out) const {
    if (taps_ == 9) {
      put<9>(columns, out);
    } else {
      put<0>(columns, out);
    }
  }

 private:
  // The number of channels that are moved at once, with all of their taps in one word.
  static constexpr int64_t channels_at_once(int64_t taps) {
    return std::clamp<int64_t>(64 / std::max<int64_t>(taps, 1), 1, 8);
  }

  // For a number of taps that is known at compile time, or 0: without it, the loop over taps compiles to gathers, which
  // take twice as long as the same loads one by one.
  template <int64_t known>
  void put(const uint64_t* columns, uint64_t* out) const {
    const int64_t taps = known > 0 ? known : taps_, some = channels_at_once(taps);
    const uint64_t low = (uint64_t{1} << some) - 1;
    uint64_t pending = 0;
    int64_t filled = 0;
    for (int64_t first = 0; first < in_; first += 64) {
      const int64_t n = std::min<int64_t>(64, in_ - first);
      uint64_t channels[kMaxTaps];
      for (int64_t tap = 0; tap < taps; ++tap) {
        const int64_t col = tap * in_ + first, shift = col % 64;
        const uint64_t* const word = columns + col / 64;
        channels[tap] = (word[0] >> shift | word[1] << 1 << (63 - shift)) & ~uint64_t{0} >> (64 - n);
      }
      for (int64_t i = 0; i < n; i += some) {
        uint64_t bits = 0;
        for (int64_t tap = 0; tap < taps; ++tap) bits |= spread_[channels[tap] >> i & low] << tap;
        const int64_t count = std::min(some, n - i) * taps;
        pending |= bits << filled;
        filled += count;
        if (filled < 64) continue;
        *out++ = pending;
        filled -= 64;
        pending = filled == 0 ? 0 : bits >> (count - filled);
      }
    }
    if (filled > 0) *out = pending;
  }

  int64_t in_, taps_;
  uint64_t spread_[256];  // input: one bit per channel; output: these bits `taps` apart
};

}  // namespace partkernels::cpu::PARTKERNELS_ISA
