// The packed map, format 1: the partition of each weight entry, in 1, 2, 4 or 8 bits per entry.
//
// Rows are the weight's first dimension; columns run over the other dimensions with the input channels innermost. Entry
// (r, c) holds its partition - 1 in byte c * bits / 8 of row r, at bit (c * bits) mod 8, low bits first.
#pragma once

#include <cstdint>

#include "partkernels/host_device.h"

namespace partkernels {

constexpr int kMaxPartitions = 256;
constexpr int64_t kRowAlignment = 16;

// The smallest of 1, 2, 4, 8 with 2^bits >= count.
PARTKERNELS_FUNCTION int bits_for(int count) { return count <= 2 ? 1 : count <= 4 ? 2 : count <= 16 ? 4 : 8; }

// Bytes of a row, including padding.
PARTKERNELS_FUNCTION int64_t row_bytes(int64_t cols, int bits) {
  const int64_t used = (cols * bits + 7) / 8;
  return (used + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
}

// The partition - 1 of one entry of a row.
PARTKERNELS_FUNCTION int id_at(const uint8_t* row, int64_t col, int bits) {
  const int64_t bit = col * bits;
  return (row[bit / 8] >> (bit % 8)) & ((1 << bits) - 1);
}

}  // namespace partkernels
