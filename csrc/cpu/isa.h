// Code in the namespace PARTKERNELS_ISA is compiled once for each instruction set.
//
// Only the isa_*.cpp files include these headers, after they have set the instruction set for the functions that
// follow. They define PARTKERNELS_AVX2 and so on, since the compiler's macros do not follow a pragma in C++.
#pragma once

#ifndef PARTKERNELS_ISA
#error "This header is compiled once for each instruction set: include it through an isa_*.cpp."
#endif

namespace partkernels::cpu::PARTKERNELS_ISA {

// The size of a vector in bytes, and the number of vector registers.
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

// Whether bfloat16 is multiplied in AMX tiles; only bfloat16 products are compiled then.
#if defined(PARTKERNELS_AMX)
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif

}  // namespace partkernels::cpu::PARTKERNELS_ISA
