// The formats in C++: known answers, and fast code against the one-entry definitions.
#include "check.h"
#include "partkernels/cpu.h"
#include "partkernels/packed_map.h"
#include "philox_lanes.h"
#include "rebuild.h"

using namespace partkernels;

namespace {

void philox_gives_the_known_answers() {
  const Philox zero = philox4x32(0, 0, 0, 0, 0);
  const uint32_t of_zero[4] = {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48};
  const Philox pi = philox4x32(0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0x299f31d0a4093822);
  const uint32_t of_pi[4] = {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a};
  for (int w = 0; w < 4; ++w) {
    CHECK(zero.word[w] == of_zero[w]);
    CHECK(pi.word[w] == of_pi[w]);
  }
}

void lanes_are_philox_of_consecutive_counters() {
  uint32_t words[4][cpu::kLanes];
  cpu::philox_lanes(160, 1, 0xFFFFFFFF, 3, 0x123456789ABCDEF0, words);
  for (int lane = 0; lane < cpu::kLanes; ++lane) {
    const Philox drawn = philox4x32(160 + lane, 1, 0xFFFFFFFF, 3, 0x123456789ABCDEF0);
    for (int w = 0; w < 4; ++w) CHECK(words[w][lane] == drawn.word[w]);
  }
}

void bfloat16_rounds_to_nearest_even() {
  CHECK(to_bfloat16(1.0f).bits == 0x3F80);
  CHECK(to_bfloat16(float_from_bits(0x3F808000)).bits == 0x3F80);  // a tie, down to even
  CHECK(to_bfloat16(float_from_bits(0x3F818000)).bits == 0x3F82);  // a tie, up to even
  CHECK(to_bfloat16(float_from_bits(0x3F808001)).bits == 0x3F81);
  CHECK(to_bfloat16(float_from_bits(0x7F800001)).bits == 0x7FC0);  // NaN
  CHECK(to_bfloat16(float_from_bits(0xFF800000)).bits == 0xFF80);  // -inf
}

void defaults_give_the_known_answers() {
  // Computed in Python, by two implementations that tests/test_formats.py compares.
  const int64_t cols[8] = {0, 1, 2, 8, 16, 63, 64, 199};
  const uint16_t uniform[8] = {0xbceb, 0x3d2f, 0x3cc4, 0x3d8e, 0x3d80, 0x3bdb, 0x3d12, 0xbda3};
  const uint16_t normal[8] = {0xbbc8, 0x3db7, 0x3e13, 0xbd37, 0xbe21, 0x3e05, 0xbdce, 0x0000};
  const uint64_t seed = (uint64_t{7} << 32) | 5, stream = (uint64_t{3} << 32) | 2;
  for (int i = 0; i < 8; ++i) {
    const Defaults u{DefaultKind::uniform, 0x1.9cp-11f, seed, stream};
    const Defaults n{DefaultKind::normal, 0x1.62ba0ap-11f, seed, stream};
    CHECK(to_bfloat16(default_value(u, 8, cols[i])).bits == uniform[i]);
    CHECK(to_bfloat16(default_value(n, 8, cols[i])).bits == normal[i]);
  }
}

void rebuild_takes_live_entries_and_the_defaults_of_the_others(int count, DefaultKind kind) {
  constexpr int64_t kRows = 3, kCols = 700;
  const int bits = bits_for(count);
  std::vector<uint8_t> map(kRows * row_bytes(kCols, bits));
  std::vector<float> weight(kRows * kCols), stored(kRows * kCols);
  for (int64_t i = 0; i < kRows * kCols; ++i) {
    weight[i] = 1 + static_cast<float>(i);
    stored[i] = -static_cast<float>(i);
    const int64_t row = i / kCols, bit = i % kCols * bits;
    map[row * row_bytes(kCols, bits) + bit / 8] |= static_cast<uint8_t>(i * 7 % count << (bit % 8));
  }
  for (int active = 1; active <= count; active += count > 4 ? 5 : 1) {
    const cpu::Subnetwork<float> w{{weight.data(), kRows, kCols, 1, 1, kCols, 1, 0, 0},
                                   {map.data(), row_bytes(kCols, bits), bits},
                                   count,
                                   active,
                                   {kind, 0.01f, 11, 12},
                                   {stored.data(), kRows, kCols, 1, 1, kCols, 1, 0, 0}};
    // Pieces that start and end anywhere.
    for (const auto& [col, n] : {std::pair<int64_t, int64_t>{0, 700}, {0, 1}, {63, 2}, {5, 257}, {129, 512}}) {
      std::vector<float> out(n);
      cpu::rebuild(w, 2, col, n, out.data());
      for (int64_t j = 0; j < n; ++j) {
        const int64_t entry = 2 * kCols + col + j;
        const float dead = kind == DefaultKind::stored ? stored[entry] : default_value(w.defaults, 2, col + j);
        CHECK(float_bits(out[j]) == float_bits(entry * 7 % count < active ? weight[entry] : dead));
      }
    }
  }
}

}  // namespace

int main() {
  philox_gives_the_known_answers();
  lanes_are_philox_of_consecutive_counters();
  bfloat16_rounds_to_nearest_even();
  defaults_give_the_known_answers();
  for (const int count : {1, 2, 3, 5, 17, 256}) {
    for (const auto kind : {DefaultKind::zeros, DefaultKind::uniform, DefaultKind::normal, DefaultKind::stored}) {
      rebuild_takes_live_entries_and_the_defaults_of_the_others(count, kind);
    }
  }
}
