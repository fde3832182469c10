// Defaults, format 1: the values of entries in inactive partitions.
//
// Each value is a pure function of (seed, stream, global row, global column) and exact in bfloat16 whatever the
// weight's dtype. So casts never change it, and a shard regenerates exactly its own entries.
#pragma once

#include <cstdint>

#include "partkernels/bfloat16.h"
#include "partkernels/host_device.h"
#include "partkernels/philox.h"

namespace partkernels {

enum class DefaultKind { zeros, uniform, normal, stored };

// How inactive entries get their values.
struct Defaults {
  DefaultKind kind = DefaultKind::zeros;
  // uniform: bfloat16(float(scale / 127.5)); normal: float(std / sqrt(21845)).
  float step = 0;
  uint64_t seed = 0;
  uint64_t stream = 0;
  // The position of this shard's first entry in the unsharded weight; col is a multiple of 64.
  int64_t row = 0;
  int64_t col = 0;
};

PARTKERNELS_FUNCTION float round_to_bfloat16(float value) { return to_float(to_bfloat16(value)); }

// The words of one Philox call; row and group are relative to the unsharded weight.
PARTKERNELS_FUNCTION Philox default_words(const Defaults& d, int64_t row, int64_t group) {
  return philox4x32(static_cast<uint32_t>(group), static_cast<uint32_t>(row), low_word(d.stream), high_word(d.stream),
                    d.seed);
}

// Uniform: one Philox call gives 16 entries, one byte each. Group and byte follow the order in which tensor-core
// fragments distribute 64 columns of a row over the four threads of a quad.
constexpr int64_t kUniformColumns = 64;
constexpr int kUniformGroups = 4;

PARTKERNELS_FUNCTION int uniform_group(int col_in_block) { return (col_in_block / 2) % 4; }
PARTKERNELS_FUNCTION int uniform_byte(int col_in_block) {
  return 4 * (col_in_block / 16) + 2 * ((col_in_block / 8) % 2) + col_in_block % 2;
}

PARTKERNELS_FUNCTION float uniform_value(uint32_t byte, float step) {
  const float magnitude = (static_cast<float>(byte & 0x7F) + 0.5f) * step;
  return round_to_bfloat16(byte & 0x80 ? -magnitude : magnitude);
}

// Normal: one call gives 4 entries, one word each; a value is a four-term Irwin-Hall sum of the word's bytes.
constexpr int64_t kNormalColumns = 4;

PARTKERNELS_FUNCTION float normal_value(uint32_t word, float step) {
  const int total = static_cast<int>((word & 0xFF) + (word >> 8 & 0xFF) + (word >> 16 & 0xFF) + (word >> 24)) - 510;
  return round_to_bfloat16(static_cast<float>(total) * step);
}

// The default of one entry. This is the definition that faster code must match. Not for DefaultKind::stored.
PARTKERNELS_FUNCTION float default_value(const Defaults& d, int64_t row, int64_t col) {
  row += d.row;
  col += d.col;
  switch (d.kind) {
    case DefaultKind::uniform: {
      const int in_block = static_cast<int>(col % kUniformColumns);
      const int64_t group = col / kUniformColumns * kUniformGroups + uniform_group(in_block);
      const int byte = uniform_byte(in_block);
      return uniform_value(default_words(d, row, group).word[byte / 4] >> (8 * (byte % 4)) & 0xFF, d.step);
    }
    case DefaultKind::normal:
      return normal_value(default_words(d, row, col / kNormalColumns).word[col % kNormalColumns], d.step);
    default:
      return 0;
  }
}

}  // namespace partkernels
