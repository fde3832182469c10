// The operators as a table of functions, one for each instruction set that the library is compiled for.
#pragma once

#include "partkernels/cpu.h"

// Whether the compiler can make functions for instruction sets beyond its own target.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PARTKERNELS_X86_TARGETS
#endif

namespace partkernels::cpu {

template <class T>
struct OperatorsOn {
  decltype(&cpu::linear<T>) linear;
  decltype(&cpu::linear_grad_input<T>) linear_grad_input;
  decltype(&cpu::linear_grad_weight<T>) linear_grad_weight;
  decltype(&cpu::conv2d<T>) conv2d;
  decltype(&cpu::conv2d_grad_input<T>) conv2d_grad_input;
  decltype(&cpu::few_channels_grad_input<T>) few_channels_grad_input;
  decltype(&cpu::conv2d_grad_weight<T>) conv2d_grad_weight;
  decltype(&cpu::subnetwork_weight<T>) subnetwork_weight;
  decltype(&cpu::subnetwork_weight_grad<T>) subnetwork_weight_grad;
  decltype(&cpu::embedding<T>) embedding;
  decltype(&cpu::sgd_step<T>) sgd_step;
  decltype(&cpu::adam_step<T>) adam_step;
};

struct Operators {
  OperatorsOn<float> on_float;
  OperatorsOn<double> on_double;
  OperatorsOn<bfloat16> on_bfloat16;
  decltype(&cpu::random_map) random_map;
};

const Operators& portable_operators();
#if defined(PARTKERNELS_X86_TARGETS)
const Operators& avx2_operators();
const Operators& avx512_operators();
const Operators& avx512_bf16_operators();
#endif

}  // namespace partkernels::cpu
