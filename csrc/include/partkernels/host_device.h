#pragma once

// Marks a function that C++ and CUDA code share.
#if defined(__CUDACC__)
#define PARTKERNELS_FUNCTION __host__ __device__ __forceinline__
#else
#define PARTKERNELS_FUNCTION inline
#endif
