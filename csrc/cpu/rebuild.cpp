#include "rebuild.h"

#include <algorithm>

#include "isa.h"
#include "partkernels/packed_map.h"
#include "philox_lanes.h"

namespace partkernels::cpu {
namespace {

// Columns that are decoded and drawn at once: one vector of Philox calls serves 256 uniform entries.
constexpr int64_t kPiece = 256;

// Entry j of 64 columns takes byte kByteOfColumn[j] of its block's four calls.
struct ByteOfColumn {
  uint8_t at[kUniformColumns];
  constexpr ByteOfColumn() : at() {
    for (int j = 0; j < kUniformColumns; ++j) {
      at[j] = static_cast<uint8_t>(16 * (j / 2 % 4) + 4 * (j / 16) + 2 * (j / 8 % 2) + j % 2);
    }
  }
};
constexpr ByteOfColumn kByteOfColumn;

PARTKERNELS_CLONES
void values_from_bytes(const uint8_t* bytes, int64_t n, float step, float* values) {
  for (int64_t j = 0; j < n; ++j) values[j] = uniform_value(bytes[j], step);
}

// values[j] = the default of (row, col + j) for j in [0, n); col is a multiple of 64, n at most kPiece.
void draw_uniform(const Defaults& d, int64_t row, int64_t col, int64_t n, float* values) {
  static_assert(kLanes * kUniformColumns / kUniformGroups == kPiece);
  uint32_t words[4][kLanes];
  philox_lanes(static_cast<uint32_t>(col / kUniformColumns * kUniformGroups), static_cast<uint32_t>(row),
               low_word(d.stream), high_word(d.stream), d.seed, words);
  uint8_t calls[kLanes][16];
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int byte = 0; byte < 16; ++byte) {
      calls[lane][byte] = static_cast<uint8_t>(words[byte / 4][lane] >> (8 * (byte % 4)));
    }
  }
  uint8_t bytes[kPiece];
  for (int64_t block = 0; block < n; block += kUniformColumns) {
    const uint8_t* drawn = calls[block / kUniformColumns * kUniformGroups];
    for (int j = 0; j < kUniformColumns; ++j) bytes[block + j] = drawn[kByteOfColumn.at[j]];
  }
  values_from_bytes(bytes, n, d.step, values);
}

// As draw_uniform; col is a multiple of 4.
void draw_normal(const Defaults& d, int64_t row, int64_t col, int64_t n, float* values) {
  for (int64_t start = 0; start < n; start += kLanes * kNormalColumns) {
    uint32_t words[4][kLanes];
    philox_lanes(static_cast<uint32_t>((col + start) / kNormalColumns), static_cast<uint32_t>(row),
                 low_word(d.stream), high_word(d.stream), d.seed, words);
    const int64_t end = std::min(n, start + kLanes * kNormalColumns);
    for (int64_t j = start; j < end; ++j) {
      values[j] = normal_value(words[(j - start) % 4][(j - start) / 4], d.step);
    }
  }
}

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
    for_each_entry(w.stored, row, col, n, [&](int64_t j, const T* entry) { out[j] = live[j] ? out[j] : widen(*entry); });
  } else {
    // Draws start at a whole block, so that each call is made once.
    const int64_t before = col % kUniformColumns;
    float values[kPiece];
    const auto draw = w.defaults.kind == DefaultKind::uniform ? draw_uniform : draw_normal;
    draw(w.defaults, row, col - before, before + n, values);
    for (int64_t j = 0; j < n; ++j) out[j] = live[j] ? out[j] : static_cast<Accumulator<T>>(values[before + j]);
  }
}

}  // namespace

PARTKERNELS_CLONES
void select_owners(const Owners& owners, int64_t row, int64_t col, int64_t n, int first, int last, uint8_t* keep) {
  const uint8_t* const map = owners.row(row);
  const int bits = owners.bits;
  for (int64_t j = 0; j < n; ++j) {
    const int partition = id_at(map, col + j, bits) + 1;
    keep[j] = partition >= first && partition <= last;
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
