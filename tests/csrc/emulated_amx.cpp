// Emulates the instructions as defined in Intel's manual (Software Developer's Manual, volume 2: LDTILECFG,
// TILERELEASE, TILEZERO, TILELOADD, TILELOADDT1, TILESTORED, TDPBF16PS), with stricter rules: faults end the program,
// tiles hold NaN until they are written, and a thread must release its tiles before it ends.
#include "emulated_amx.h"

#include <signal.h>
#include <ucontext.h>

#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "amx.h"

namespace partkernels::cpu::amx {

Faults faults;

// These replace the library's functions. A processor with AMX needs no emulator.
bool has_tiles() { return __builtin_cpu_supports("amx-tile") == 0; }
bool has_products() { return has_tiles(); }
bool is_permitted() { return !faults.refuses; }

namespace {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64, kFloats = kRowBytes / sizeof(float);

void demand(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "emulated AMX: %s\n", what);
  std::abort();
}

// A thread's tiles.
struct State {
  bool is_configured = false;
  Configuration configuration;
  alignas(64) uint8_t data[kTiles][kRows][kRowBytes];

  ~State() { demand(!is_configured, "a thread ends with its tiles configured"); }

  int rows(int tile) const {
    demand(is_configured, "tiles are used that were not configured");
    demand(configuration.rows[tile] > 0, "a tile is used that has no rows");
    return configuration.rows[tile];
  }
  int row_bytes(int tile) const { return configuration.row_bytes[tile]; }
};
thread_local State state;

void emulate_configure(const Configuration& tiles) {
  demand(!state.is_configured, "tiles are configured while they are in use");
  demand(tiles.palette == 1 && tiles.start_row == 0, "there is no such palette, or rows are left out");
  for (const uint8_t byte : tiles.reserved) demand(byte == 0, "a reserved byte of a configuration is not 0");
  for (int tile = 0; tile < 16; ++tile) {
    const int rows = tiles.rows[tile], row_bytes = tiles.row_bytes[tile];
    demand(rows <= (tile < kTiles ? kRows : 0) && row_bytes <= (tile < kTiles ? kRowBytes : 0), "a tile is too large");
    demand((rows == 0) == (row_bytes == 0), "a tile has rows of no bytes, or no rows");
  }
  state.is_configured = true;
  state.configuration = tiles;
  std::memset(state.data, 0xFF, sizeof(state.data));  // NaN; the processor writes zeros
}

void emulate_zero(int tile) {
  state.rows(tile);
  std::memset(state.data[tile], 0, sizeof(state.data[tile]));
}

void emulate_load(int tile, const char* from, int64_t stride) {
  emulate_zero(tile);
  for (int r = 0; r < state.rows(tile); ++r) {
    std::memcpy(state.data[tile][r], from + r * stride, state.row_bytes(tile));
  }
}

void emulate_store(int tile, char* to, int64_t stride) {
  for (int r = 0; r < state.rows(tile); ++r) std::memcpy(to + r * stride, state.data[tile][r], state.row_bytes(tile));
}

// Subnormal numbers are flushed to 0 before and after each operation.
float flushed(float value) { return std::fabs(value) < FLT_MIN ? std::copysign(0.0f, value) : value; }
float even(uint32_t pair) { return flushed(std::bit_cast<float>(pair << 16)); }
float odd(uint32_t pair) { return flushed(std::bit_cast<float>(pair & 0xFFFF0000)); }

void emulate_add_product(int sum, int left, int right) {
  demand(sum != left && sum != right && left != right, "a tile is two operands of a product");
  const int rows = state.rows(sum), depth = state.rows(right), row_bytes = state.row_bytes(sum);
  demand(row_bytes % 4 == 0 && state.row_bytes(left) % 4 == 0, "rows of a product are not of whole pairs and sums");
  demand(state.rows(left) == rows && state.row_bytes(left) == 4 * depth && state.row_bytes(right) == row_bytes,
         "the tiles of a product do not fit together");
  for (int i = 0; i < rows - faults.drops_a_row; ++i) {
    uint32_t left_row[kFloats], right_row[kFloats];
    float evens[kFloats] = {}, odds[kFloats] = {}, sums[kFloats];
    std::memcpy(left_row, state.data[left][i], sizeof(left_row));
    for (int k = 0; k < depth; ++k) {
      std::memcpy(right_row, state.data[right][k], sizeof(right_row));
      for (int j = 0; j < kFloats; ++j) {
        const uint32_t pair = faults.swaps_pairs ? std::rotl(right_row[j], 16) : right_row[j];
        // Rounded once, like an FMA, since the product of two bfloat16 numbers is exact in float.
        evens[j] = flushed(evens[j] + even(left_row[k]) * even(pair));
        odds[j] = flushed(odds[j] + odd(left_row[k]) * odd(pair));
      }
    }
    std::memcpy(sums, state.data[sum][i], sizeof(sums));
    for (int j = 0; j < kFloats; ++j) {
      sums[j] = flushed((faults.keeps_no_sums ? 0 : flushed(sums[j])) + flushed(evens[j] + odds[j]));
    }
    std::memcpy(state.data[sum][i], sums, row_bytes);
  }
}

// An instruction with a three-byte VEX prefix, as all AMX instructions have.
struct Instruction {
  int prefix, opcode, mod, reg, rm, vvvv;
  int64_t address = 0, index = 0;  // memory operand: base plus displacement, and the scaled index register
  const uint8_t* end;

  Instruction(const uint8_t* code, const greg_t* registers) {
    demand(code[0] == 0xC4 && (code[1] & 0x9F) == 0x82 && (code[2] & 0x84) == 0, "another instruction is illegal");
    prefix = code[2] & 3;
    vvvv = ~code[2] >> 3 & 15;
    opcode = code[3];
    mod = code[4] >> 6;
    reg = code[4] >> 3 & 7;
    rm = code[4] & 7;
    end = code + 5;
    if (mod == 3) return;
    constexpr int kNumbers[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    int base = rm, scaled = 4;
    if (rm == 4) {
      const uint8_t sib = *end++;
      base = sib & 7;
      scaled = (sib >> 3 & 7) + (code[1] & 0x40 ? 0 : 8);
      if (scaled != 4) index = registers[kNumbers[scaled]] << (sib >> 6);
    }
    demand(mod != 0 || base != 5, "an address without a base is not emulated");
    address = registers[kNumbers[base + (code[1] & 0x20 ? 0 : 8)]];
    if (mod == 1) address += static_cast<int8_t>(*end++);
    if (mod == 2) {
      int32_t displacement;
      std::memcpy(&displacement, end, 4);
      address += displacement;
      end += 4;
    }
  }

  bool is(int with_opcode, int with_prefix, bool of_memory) const {
    return opcode == with_opcode && prefix == with_prefix && (mod != 3) == of_memory;
  }
};

void on_illegal_instruction(int, siginfo_t*, void* context) {
  greg_t* const registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  constexpr int kNone = 0, k66 = 1, kF3 = 2, kF2 = 3;
  const Instruction found(reinterpret_cast<const uint8_t*>(registers[REG_RIP]), registers);
  char* const memory = reinterpret_cast<char*>(found.address);
  if (found.is(0x49, kNone, true)) {
    Configuration tiles;
    std::memcpy(&tiles, memory + found.index, sizeof(tiles));
    emulate_configure(tiles);
  } else if (found.is(0x49, kNone, false)) {
    state.is_configured = false;
  } else if (found.is(0x49, kF2, false)) {
    emulate_zero(found.reg);
  } else if (found.is(0x4B, kF2, true) || found.is(0x4B, k66, true)) {
    emulate_load(found.reg, memory, found.index);
  } else if (found.is(0x4B, kF3, true)) {
    emulate_store(found.reg, memory, found.index);
  } else if (found.is(0x5C, kF3, false)) {
    emulate_add_product(found.reg, found.rm, found.vvvv);
  } else {
    demand(false, "another instruction is illegal");
  }
  registers[REG_RIP] = reinterpret_cast<greg_t>(found.end);
}

[[maybe_unused]] const int installed = [] {
  struct sigaction action = {};
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO;
  return sigaction(SIGILL, &action, nullptr);
}();

}  // namespace
}  // namespace partkernels::cpu::amx
