// What is compiled once for each instruction set: everything in namespace PARTKERNELS_ISA.
//
// Such a header is included by the isa_*.cpp alone, after they have set the instruction set for the functions that
// follow. They define PARTKERNELS_AVX2 and so on, since the compiler's own macros do not follow a pragma in C++.
#pragma once

#ifndef PARTKERNELS_ISA
#error "This header is compiled once for each instruction set: include it through an isa_*.cpp."
#endif

namespace partkernels::cpu::PARTKERNELS_ISA {

// Bytes of a vector, and how many of them an operation may keep in registers.
#if defined(PARTKERNELS_AVX512)
constexpr int kVectorBytes = 64;
constexpr int kVectorRegisters = 32;
#elif defined(PARTKERNELS_AVX2)
constexpr int kVectorBytes = 32;
constexpr int kVectorRegisters = 16;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16;
constexpr int kVectorRegisters = 32;
#else
constexpr int kVectorBytes = 16;
constexpr int kVectorRegisters = 16;
#endif

// Whether bfloat16 is multiplied in tiles of AMX; nothing but its products is compiled then.
#if defined(PARTKERNELS_AMX)
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif

}  // namespace partkernels::cpu::PARTKERNELS_ISA
