// Random numbers for the tests of the CUDA kernels, and conversions of any type from and to double.
#pragma once

#include <random>
#include <type_traits>

#include "emulated_gpu.h"

inline std::mt19937 random_words;

inline int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_words); }
inline double uniform(double low, double high) {
  return std::uniform_real_distribution<double>(low, high)(random_words);
}

template <class T>
T narrow(double value) {
  if constexpr (std::is_same_v<T, partkernels::bfloat16>) {
    return partkernels::to_bfloat16(static_cast<float>(value));
  } else if constexpr (std::is_same_v<T, partkernels::float16>) {
    return partkernels::cuda::to_float16(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

template <class T>
double widen(T value) {
  if constexpr (sizeof(T) == 2) {
    return partkernels::cuda::as_float(value);
  } else {
    return value;
  }
}
