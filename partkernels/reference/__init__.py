"""The definition: every operator in plain PyTorch, on any device and floating dtype.

It materialises the subnetwork's weight, which the other backends never do; they are tested against it.
"""

from partkernels.reference.conv2d import conv2d, conv2d_grad_input, conv2d_grad_weight
from partkernels.reference.defaults import drawn
from partkernels.reference.embedding import embedding
from partkernels.reference.linear import linear, linear_grad_bias, linear_grad_input, linear_grad_weight
from partkernels.reference.optimizers import adam_step, sgd_step
from partkernels.reference.random_map import random_map
from partkernels.reference.subnetwork_weight import subnetwork_weight, subnetwork_weight_grad

__all__ = [
    "adam_step",
    "conv2d",
    "conv2d_grad_input",
    "conv2d_grad_weight",
    "drawn",
    "embedding",
    "linear",
    "linear_grad_bias",
    "linear_grad_input",
    "linear_grad_weight",
    "random_map",
    "sgd_step",
    "subnetwork_weight",
    "subnetwork_weight_grad",
]
