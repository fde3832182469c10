// A minimal test framework for the C++ tests.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "partkernels/cpu.h"

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (false)

// Whether an environment variable is set and not empty: FULL runs all cases.
inline bool asks_for(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr && *value != '\0';
}
inline bool is_full() { return asks_for("FULL"); }

// Two ways to run loops.
inline void in_turn(int64_t count, const partkernels::cpu::Body& body) {
  for (int64_t i = 0; i < count; ++i) body(i, i + 1);
}

inline void on_three_threads(int64_t count, const partkernels::cpu::Body& body) {
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < 3; ++t) threads.emplace_back([&, t] { body(count * t / 3, count * (t + 1) / 3); });
  for (std::thread& thread : threads) thread.join();
}

// Ends the test as skipped if the processor lacks the instruction set in PARTKERNELS_CPU_ISA.
inline void unless_another_processor_is_needed() {
  try {
    std::printf("instruction set: %s\n", partkernels::cpu::instruction_set());
  } catch (const std::runtime_error& error) {
    std::printf("skipped: %s\n", error.what());
    std::exit(77);
  }
}
