// A processor with AMX, emulated on one without: the library's own code runs, and whenever one of its tile instructions
// turns out to be illegal, the emulator does what it should have done.
#pragma once

namespace partkernels::cpu::amx {

// What a test may have the system and the processor do.
struct Faults {
  bool refuses = false;        // no permission is given
  bool drops_a_row = false;    // the last row of a product is not added
  bool swaps_pairs = false;    // the entries of the right operand's pairs change places
  bool keeps_no_sums = false;  // products are stored instead of added
};
extern Faults faults;

}  // namespace partkernels::cpu::amx
