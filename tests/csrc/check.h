// The few lines that the C++ tests need of a test framework.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#include "partkernels/cpu.h"

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (false)

// Ends the test, and says to ctest that it was skipped, if this processor lacks what PARTKERNELS_CPU_ISA asks for.
inline void unless_another_processor_is_needed() {
  try {
    std::printf("instruction set: %s\n", partkernels::cpu::instruction_set());
  } catch (const std::runtime_error& error) {
    std::printf("skipped: %s\n", error.what());
    std::exit(77);
  }
}
