#include "rebuild.h"

#include <algorithm>
#include <cstring>

#include "isa.h"
#include "partkernels/packed_map.h"
#include "philox_lanes.h"

namespace partkernels::cpu {
namespace {

// values[j] = the default of (row, col + j) for j in [0, n), and on to the end of a block of 64; n is at most kPiece,
// and col a multiple of 64.
PARTKERNELS_CLONES
void draw_uniform(const Defaults& d, int64_t row, int64_t col, int64_t n, float* values) {
  static_assert(kLanes * kUniformColumns / kUniformGroups == kPiece);
  uint32_t words[4][kLanes];
  philox_lanes(static_cast<uint32_t>(col / kUniformColumns * kUniformGroups), static_cast<uint32_t>(row),
               low_word(d.stream), high_word(d.stream), d.seed, words);
  // Columns 16 a + 8 b + 2 q + {0, 1} of a block take the half-word b of word a of call q: two bytes, low one first.
  uint16_t pairs[kPiece / 2];
  const int64_t blocks = (n + kUniformColumns - 1) / kUniformColumns;
  for (int64_t block = 0; block < blocks; ++block) {
    for (int half = 0; half < 8; ++half) {
      for (int q = 0; q < kUniformGroups; ++q) {
        pairs[block * 32 + half * 4 + q] =
            static_cast<uint16_t>(words[half / 2][block * kUniformGroups + q] >> (16 * (half % 2)));
      }
    }
  }
  for (int64_t j = 0; j < blocks * kUniformColumns / 2; ++j) {
    values[2 * j] = uniform_value(pairs[j] & 0xFF, d.step);
    values[2 * j + 1] = uniform_value(pairs[j] >> 8, d.step);
  }
}

// As draw_uniform; col is a multiple of 4.
PARTKERNELS_CLONES
void draw_normal(const Defaults& d, int64_t row, int64_t col, int64_t n, float* values) {
  for (int64_t start = 0; start < n; start += kLanes * kNormalColumns) {
    uint32_t words[4][kLanes];
    philox_lanes(static_cast<uint32_t>((col + start) / kNormalColumns), static_cast<uint32_t>(row), low_word(d.stream),
                 high_word(d.stream), d.seed, words);
    for (int lane = 0; lane < kLanes; ++lane) {
      float* const four = values + start + kNormalColumns * lane;
      four[0] = normal_value(words[0][lane], d.step);
      four[1] = normal_value(words[1][lane], d.step);
      four[2] = normal_value(words[2][lane], d.step);
      four[3] = normal_value(words[3][lane], d.step);
    }
  }
}

// What the bytes of a map hold: the ids of 8 / bits entries each.
struct DecodedBytes {
  uint8_t ids[256][8];
  explicit constexpr DecodedBytes(int bits) : ids() {
    for (int byte = 0; byte < 256; ++byte) {
      for (int slot = 0; slot < 8 / bits; ++slot) {
        ids[byte][slot] = static_cast<uint8_t>(byte >> (slot * bits) & ((1 << bits) - 1));
      }
    }
  }
};

template <int bits>
void decode(const uint8_t* bytes, int64_t count, uint8_t* ids) {
  static constexpr DecodedBytes decoded(bits);
  for (int64_t i = 0; i < count; ++i) std::memcpy(ids + i * (8 / bits), decoded.ids[bytes[i]], 8 / bits);
}

// out[j] = live[j] ? out[j] : values[j].
template <class Acc>
__attribute__((always_inline)) inline void select(const uint8_t* live, const float* values, int64_t n, Acc* out) {
  for (int64_t j = 0; j < n; ++j) out[j] = live[j] ? out[j] : static_cast<Acc>(values[j]);
}

PARTKERNELS_CLONES
void select_live(const uint8_t* live, const float* values, int64_t n, float* out) { select(live, values, n, out); }

PARTKERNELS_CLONES
void select_live(const uint8_t* live, const float* values, int64_t n, double* out) { select(live, values, n, out); }

template <class T>
void load(const Weight<const T>& weight, int64_t row, int64_t col, int64_t n, Accumulator<T>* out) {
  for_each_entry(weight, row, col, n, [&](int64_t j, const T* entry) { out[j] = widen(*entry); });
}

// Replaces the entries of one aligned piece that are not live.
template <class T>
void fill_defaults(const Subnetwork<T>& w, int64_t row, int64_t col, int64_t n, const uint8_t* live,
                   Accumulator<T>* out) {
  if (w.defaults.kind == DefaultKind::zeros) {
    for (int64_t j = 0; j < n; ++j) out[j] = live[j] ? out[j] : 0;
  } else if (w.defaults.kind == DefaultKind::stored) {
    for_each_entry(w.stored, row, col, n,
                   [&](int64_t j, const T* entry) { out[j] = live[j] ? out[j] : widen(*entry); });
  } else {
    // Draws start at a whole block, so that each call is made once.
    const int64_t before = col % kUniformColumns;
    float values[kPiece];
    const auto draw = w.defaults.kind == DefaultKind::uniform ? draw_uniform : draw_normal;
    draw(w.defaults, row, col - before, before + n, values);
    select_live(live, values + before, n, out);
  }
}

}  // namespace

void select_owners(const Owners& owners, int64_t row, int64_t col, int64_t n, int first, int last, uint8_t* keep) {
  const int per_byte = 8 / owners.bits;
  uint8_t ids[kPiece + 16];
  for (int64_t start = 0; start < n; start += kPiece) {
    const int64_t piece = std::min(n - start, kPiece);
    const int64_t before = (col + start) % per_byte;
    const uint8_t* bytes = owners.row(row) + (col + start) / per_byte;
    const int64_t count = (before + piece + per_byte - 1) / per_byte;
    const auto decode_bits = owners.bits == 1   ? decode<1>
                             : owners.bits == 2 ? decode<2>
                             : owners.bits == 4 ? decode<4>
                                                : decode<8>;
    decode_bits(bytes, count, ids);
    const auto low = static_cast<uint8_t>(first - 1);
    const auto span = static_cast<uint8_t>(last - first);
    for (int64_t j = 0; j < piece; ++j) keep[start + j] = static_cast<uint8_t>(ids[before + j] - low) <= span;
  }
}

template <class T>
void rebuild(const Subnetwork<T>& w, int64_t row, int64_t col, int64_t n, Accumulator<T>* out) {
  load(w.weight, row, col, n, out);
  if (w.active == w.count) return;
  for (int64_t start = 0; start < n;) {
    const int64_t piece = std::min(n - start, kPiece - (col + start) % kUniformColumns);
    uint8_t live[kPiece];
    select_owners(w.owners, row, col + start, piece, 1, w.active, live);
    if (std::find(live, live + piece, 0) != live + piece) fill_defaults(w, row, col + start, piece, live, out + start);
    start += piece;
  }
}

template void rebuild(const Subnetwork<float>&, int64_t, int64_t, int64_t, float*);
template void rebuild(const Subnetwork<double>&, int64_t, int64_t, int64_t, double*);
template void rebuild(const Subnetwork<bfloat16>&, int64_t, int64_t, int64_t, float*);

}  // namespace partkernels::cpu
