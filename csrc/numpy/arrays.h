// Numpy arrays as operands of the kernels: pointers, sizes and strides.
//
// Nothing is checked here: partkernels_numpy has checked the arguments and allocated the arrays of the results.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "partkernels/cpu.h"
#include "partkernels/packed_map.h"
#include "thread_pool.h"

namespace partkernels::numpy {

namespace py = pybind11;
using Array = py::array;
using OptionalArray = std::optional<Array>;

// Calls use(T{}) with the C++ type of an array's entries. bfloat16 is not a dtype of numpy itself, but a two-byte dtype
// with that name.
template <class Use>
void with_type(const Array& array, const Use& use) {
  switch (array.dtype().num()) {
    case py::detail::npy_api::NPY_FLOAT_:
      return use(float{});
    case py::detail::npy_api::NPY_DOUBLE_:
      return use(double{});
    default:
      return use(bfloat16{});
  }
}

template <class T>
T* data(const Array& array) {
  return static_cast<T*>(const_cast<void*>(array.data()));
}

inline int64_t size(const Array& array, int d) { return d < array.ndim() ? array.shape(d) : 1; }

// The stride in entries; 0 in a dimension that the array does not have.
template <class T>
int64_t stride(const Array& array, int d) {
  return d < array.ndim() ? array.strides(d) / static_cast<int64_t>(sizeof(T)) : 0;
}

template <class T>
Matrix<T> matrix(const Array& x) {
  return {data<T>(x), x.shape(0), x.shape(1), stride<T>(x, 0), stride<T>(x, 1)};
}

// An array of at most 4 dimensions as a weight.
template <class T>
Weight<T> weight_of(const Array& w) {
  return {data<T>(w),      size(w, 0),      size(w, 1),      size(w, 2),     size(w, 3),
          stride<T>(w, 0), stride<T>(w, 1), stride<T>(w, 2), stride<T>(w, 3)};
}

template <class T>
cpu::Images<T> images(const Array& x) {
  return {data<T>(x),      x.shape(0),      x.shape(1),      x.shape(2),     x.shape(3),
          stride<T>(x, 0), stride<T>(x, 1), stride<T>(x, 2), stride<T>(x, 3)};
}

template <class T>
const T* bias_data(const OptionalArray& bias) {
  return bias ? data<const T>(*bias) : nullptr;
}

// The kernels' view of a Python Partition.
struct Partition {
  Array map;          // uint8, contiguous; keeps the memory alive and may be reshaped
  int64_t row_bytes;  // bytes of a row of the map
  int count;
  Defaults defaults;
  OptionalArray stored;

  Owners owners() const { return {data<const uint8_t>(map), row_bytes, bits_for(count)}; }

  template <class T>
  Subnetwork<T> subnetwork(const Array& weight, int active) const {
    return {weight_of<const T>(weight),
            owners(),
            count,
            active,
            defaults,
            stored ? weight_of<const T>(*stored) : Weight<const T>{}};
  }
};

inline void on_threads(int64_t count, const cpu::Body& body) { ThreadPool::here().run(count, body); }
inline void on_this_thread(int64_t count, const cpu::Body& body) { body(0, count); }

// The ParallelFor for a number of multiplications, and for a pass over a number of entries.
inline cpu::ParallelFor threads_for_products(int64_t products) {
  return products < cpu::kFewProducts ? on_this_thread : on_threads;
}
inline cpu::ParallelFor threads_for_entries(int64_t entries) {
  return entries < cpu::kFewEntries ? on_this_thread : on_threads;
}

}  // namespace partkernels::numpy
