// Tests the formats in C++ against known answers, and fast code against the definitions of single entries.
#include <cstring>
#include <type_traits>
#include <vector>

#include "check.h"
#include "partkernels/cpu.h"
#include "partkernels/packed_map.h"

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

void bfloat16_rounds_to_nearest_even() {
  CHECK(to_bfloat16(1.0f).bits == 0x3F80);
  CHECK(to_bfloat16(float_from_bits(0x3F808000)).bits == 0x3F80);  // a tie, down to even
  CHECK(to_bfloat16(float_from_bits(0x3F818000)).bits == 0x3F82);  // a tie, up to even
  CHECK(to_bfloat16(float_from_bits(0x3F808001)).bits == 0x3F81);
  CHECK(to_bfloat16(float_from_bits(0x7F800001)).bits == 0x7FC0);  // NaN
  CHECK(to_bfloat16(float_from_bits(0xFF800000)).bits == 0xFF80);  // -inf
}

void defaults_give_the_known_answers() {
  // Computed in Python by two implementations, which tests/partkernels/test_formats.py compares.
  const int64_t cols[8] = {0, 1, 2, 8, 16, 63, 64, 199};
  const uint16_t uniform[8] = {0xbceb, 0x3d2f, 0x3cc4, 0x3d8e, 0x3d80, 0x3bdb, 0x3d12, 0xbda3};
  const uint16_t normal[8] = {0xbbc8, 0x3db7, 0x3e13, 0xbd37, 0xbe21, 0x3e05, 0xbdce, 0x0000};
  const uint64_t seed = (uint64_t{7} << 32) | 5, stream = (uint64_t{3} << 32) | 2;
  for (int i = 0; i < 8; ++i) {
    const Defaults u{DefaultKind::uniform, 0x1.9cp-11f, seed, stream};
    const Defaults n{DefaultKind::normal, 0x1.62ba0ap-11f, seed, stream};
    CHECK(to_bfloat16(default_value(u, 8, cols[i])).bits == uniform[i]);
    CHECK(to_bfloat16(default_value(n, 8, cols[i])).bits == normal[i]);
    // The last column, as part of a shard.
    const Defaults shard{DefaultKind::uniform, 0x1.9cp-11f, seed, stream, 8, 192};
    CHECK(to_bfloat16(default_value(shard, 0, 7)).bits == uniform[7]);
  }
}

struct Size {
  int64_t rows, in, height, width;

  int64_t cols() const { return in * height * width; }
};

// A map with a period that does not divide any tile size.
std::vector<uint8_t> map_of(const Size& size, int count) {
  const int bits = bits_for(count);
  std::vector<uint8_t> map(size.rows * row_bytes(size.cols(), bits));
  for (int64_t i = 0; i < size.rows * size.cols(); ++i) {
    const int64_t bit = i % size.cols() * bits;
    map[i / size.cols() * row_bytes(size.cols(), bits) + bit / 8] |= static_cast<uint8_t>(i * 7 % count << (bit % 8));
  }
  return map;
}

template <class T>
T number(int64_t i) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    return to_bfloat16(static_cast<float>(i % 251));
  } else {
    return static_cast<T>(i);
  }
}

// The strides of a contiguous weight. Its columns are in the map's order only if the kernel is 1 x 1.
template <class T>
Weight<T> weight_of(T* data, const Size& size) {
  return {data, size.rows, size.in, size.height, size.width, size.cols(), size.height * size.width, size.width, 1};
}

template <class T>
void a_subnetworks_weight_has_live_entries_and_defaults(const Size& size, int count, DefaultKind kind) {
  const int bits = bits_for(count);
  const int64_t cols = size.cols(), entries = size.rows * cols;
  const std::vector<uint8_t> map = map_of(size, count);
  std::vector<T> weight(entries), stored(entries), out(entries);
  for (int64_t i = 0; i < entries; ++i) {
    weight[i] = number<T>(i + 1);
    stored[i] = number<T>(-i);
  }
  for (int active = 1; active <= count; active += count > 4 ? 5 : 1) {
    const Owners owners{map.data(), row_bytes(cols, bits), bits};
    const Defaults whole{kind, 0.01f, (uint64_t{3} << 33) | 11, (uint64_t{1} << 40) | 12};
    Defaults shard = whole;
    shard.row = 70001;
    shard.col = 192;
    const Subnetwork<T> w{weight_of<const T>(weight.data(), size), owners, count, active, shard,
                          weight_of<const T>(stored.data(), size)};
    cpu::subnetwork_weight(w, 0, 0, weight_of(out.data(), size), in_turn);
    std::vector<T> gradient(entries);
    cpu::subnetwork_weight_grad(weight_of<const T>(weight.data(), size), owners, active, active,
                                weight_of(gradient.data(), size), in_turn);
    std::vector<T> in_place(weight);
    cpu::subnetwork_weight_grad(weight_of<const T>(in_place.data(), size), owners, active, active,
                                weight_of(in_place.data(), size), in_turn);
    CHECK(std::memcmp(in_place.data(), gradient.data(), entries * sizeof(T)) == 0);
    for (int64_t i = 0; i < entries; ++i) {
      const int64_t row = i / cols, in = i % cols / (size.height * size.width), pixel = i % (size.height * size.width);
      const int64_t col = pixel * size.in + in;
      const int id = static_cast<int>((row * cols + col) * 7 % count);
      T expected = weight[i];
      if (id >= active) {
        const float drawn = default_value(whole, shard.row + row, shard.col + col);
        if constexpr (std::is_same_v<T, bfloat16>) {
          expected = kind == DefaultKind::stored ? stored[i] : to_bfloat16(drawn);
        } else {
          expected = kind == DefaultKind::stored ? stored[i] : drawn;
        }
      }
      CHECK(std::memcmp(&out[i], &expected, sizeof(T)) == 0);
      const T kept = id == active - 1 ? weight[i] : T{};
      CHECK(std::memcmp(&gradient[i], &kept, sizeof(T)) == 0);
    }
  }
}

template <class T>
void an_embedding_is_rows_of_the_weight(int count, DefaultKind kind) {
  constexpr Size size{9, 150, 1, 1};
  const int bits = bits_for(count);
  const std::vector<uint8_t> map = map_of(size, count);
  std::vector<T> weight(size.rows * size.in), stored(weight.size()), whole(weight.size());
  for (size_t i = 0; i < weight.size(); ++i) {
    weight[i] = number<T>(static_cast<int64_t>(i) + 1);
    stored[i] = number<T>(-static_cast<int64_t>(i));
  }
  const Subnetwork<T> w{
      weight_of<const T>(weight.data(), size), {map.data(), row_bytes(size.in, bits), bits}, count, (count + 1) / 2,
      {kind, 0.01f, 11, 12, 70001, 192},       weight_of<const T>(stored.data(), size)};
  cpu::subnetwork_weight(w, 0, 0, weight_of(whole.data(), size), in_turn);
  const int64_t ids[] = {8, 0, 0, 3, 7, 2, 8};
  for (const size_t some : {0, 1, 4, 7}) {
    std::vector<T> out(some * size.in);
    cpu::embedding(ids, static_cast<int64_t>(some), w, out.data(), in_turn);
    for (size_t i = 0; i < some; ++i) {
      CHECK(std::memcmp(&out[i * size.in], &whole[ids[i] * size.in], size.in * sizeof(T)) == 0);
    }
  }
}

}  // namespace

int main() {
  unless_another_processor_is_needed();
  philox_gives_the_known_answers();
  bfloat16_rounds_to_nearest_even();
  defaults_give_the_known_answers();
  for (const int count : {1, 2, 3, 4, 5, 16, 17, 256}) {
    for (const auto kind : {DefaultKind::zeros, DefaultKind::uniform, DefaultKind::normal, DefaultKind::stored}) {
      for (const Size& size : {Size{7, 700, 1, 1}, Size{4, 64, 1, 1}, Size{1, 1, 1, 1}, Size{6, 5, 3, 5},
                               Size{5, 100, 3, 3}, Size{2, 33, 2, 4}, Size{3, 64, 1, 17}}) {
        a_subnetworks_weight_has_live_entries_and_defaults<float>(size, count, kind);
        a_subnetworks_weight_has_live_entries_and_defaults<double>(size, count, kind);
        a_subnetworks_weight_has_live_entries_and_defaults<bfloat16>(size, count, kind);
      }
      an_embedding_is_rows_of_the_weight<float>(count, kind);
      an_embedding_is_rows_of_the_weight<double>(count, kind);
      an_embedding_is_rows_of_the_weight<bfloat16>(count, kind);
    }
  }
}
