// Which instruction sets a function is compiled for; the best that the processor has is chosen when the library loads.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define PARTKERNELS_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define PARTKERNELS_CLONES
#endif
