// Emulates AMX on a processor without it: the library's code runs unchanged, and the emulator handles each of its tile
// instructions when it traps as illegal.
#pragma once

namespace partkernels::cpu::amx {

// Faults of the system and the processor that a test can inject.
struct Faults {
  bool refuses = false;        // the system refuses permission
  bool drops_a_row = false;    // the last row of a product is not added
  bool swaps_pairs = false;    // the entries of the right operand's pairs are swapped
  bool keeps_no_sums = false;  // products are stored instead of added
};
extern Faults faults;

}  // namespace partkernels::cpu::amx
