// Everything that is compiled for an instruction set, as a table.
#pragma once

#include "conv2d.h"
#include "conv2d_few_channels.h"
#include "embedding.h"
#include "linear.h"
#include "optimizers.h"
#include "random_map.h"
#include "subnetwork_weight.h"

namespace partkernels::cpu::PARTKERNELS_ISA {

template <class T>
constexpr OperatorsOn<T> kOperatorsOn = {
    linear<T>,
    linear_grad_input<T>,
    linear_grad_weight<T>,
    conv2d<T>,
    conv2d_grad_input<T>,
    few_channels_grad_input<T>,
    conv2d_grad_weight<T>,
    subnetwork_weight<T>,
    subnetwork_weight_grad<T>,
    embedding<T>,
    sgd_step<T>,
    adam_step<T>,
};

constexpr Operators kOperators = {kOperatorsOn<float>, kOperatorsOn<double>, kOperatorsOn<bfloat16>, random_map};

}  // namespace partkernels::cpu::PARTKERNELS_ISA
