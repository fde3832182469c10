// Settings of the optimiser steps, and the factors that each entry's arithmetic uses.
#pragma once

#include <cmath>
#include <cstdint>

#include "partkernels/operands.h"

namespace partkernels {

// Settings of a step of torch.optim.SGD, without dampening.
struct Sgd {
  double lr, momentum, weight_decay;
  bool nesterov;
};

template <class Acc>
struct SgdFactors {
  Acc lr, momentum, weight_decay;
  // decays is false if weight_decay is 0, so that an infinite parameter does not make its gradient NaN.
  bool decays, nesterov;

  SgdFactors() = default;
  explicit SgdFactors(const Sgd& sgd)
      : lr(static_cast<Acc>(sgd.lr)),
        momentum(static_cast<Acc>(sgd.momentum)),
        weight_decay(static_cast<Acc>(sgd.weight_decay)),
        decays(sgd.weight_decay != 0),
        nesterov(sgd.nesterov) {}
};

// Settings of a step of torch.optim.Adam, or of torch.optim.AdamW if decoupled. step counts from 1.
struct Adam {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled;
  int64_t step;
};

// p becomes shrink p - step_size exp_avg / (sqrt(exp_avg_sq) inverse_correction + eps).
template <class Acc>
struct AdamFactors {
  Acc step_size, lerp, beta2, square, inverse_correction, eps, weight_decay, shrink;
  bool decays;
  // Whether the new exp_avg is computed as grad plus a multiple of grad - exp_avg, or as exp_avg plus a multiple. As in
  // torch.lerp, both ends are exact.
  bool is_near_grad;

  AdamFactors() = default;
  explicit AdamFactors(const Adam& adam) {
    const double correction1 = 1 - std::pow(adam.beta1, static_cast<double>(adam.step));
    const double correction2 = 1 - std::pow(adam.beta2, static_cast<double>(adam.step));
    step_size = static_cast<Acc>(adam.lr / correction1);
    is_near_grad = adam.beta1 <= 0.5;
    lerp = static_cast<Acc>(is_near_grad ? -adam.beta1 : 1 - adam.beta1);
    beta2 = static_cast<Acc>(adam.beta2);
    square = static_cast<Acc>(1 - adam.beta2);
    inverse_correction = static_cast<Acc>(1 / std::sqrt(correction2));
    eps = static_cast<Acc>(adam.eps);
    weight_decay = static_cast<Acc>(adam.decoupled ? 0 : adam.weight_decay);
    decays = weight_decay != 0;
    shrink = static_cast<Acc>(adam.decoupled ? 1 - adam.lr * adam.weight_decay : 1);
  }
};

// A parameter and the tensors of its step. All entries are stepped if owners.map is null. momentum_buffer is not used
// if momentum is 0. step is the parameter's own step count.
template <class T>
struct SgdTensors {
  Weight<T> parameter;
  Weight<const T> grad;
  Weight<T> momentum_buffer;
  Owners owners;
};
template <class T>
struct AdamTensors {
  Weight<T> parameter;
  Weight<const T> grad;
  Weight<T> exp_avg, exp_avg_sq;
  Owners owners;
  int64_t step;
};

}  // namespace partkernels
