// The type in which each dtype is accumulated.
#pragma once

#include "partkernels/bfloat16.h"

namespace partkernels::cpu {

template <class T>
struct AccumulatorOf {
  using type = T;
};
template <>
struct AccumulatorOf<bfloat16> {
  using type = float;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

inline float widen(float value) { return value; }
inline double widen(double value) { return value; }
inline float widen(bfloat16 value) { return to_float(value); }

template <class T>
inline T narrow(Accumulator<T> value) {
  return value;
}
template <>
inline bfloat16 narrow<bfloat16>(float value) {
  return to_bfloat16(value);
}

}  // namespace partkernels::cpu
