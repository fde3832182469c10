"""All operators, each of them a file of this folder."""

from partkernels.backends.reference.conv2d import conv2d, conv2d_grad_input, conv2d_grad_weight
from partkernels.backends.reference.defaults import drawn
from partkernels.backends.reference.embedding import embedding
from partkernels.backends.reference.linear import linear, linear_grad_bias, linear_grad_input, linear_grad_weight
from partkernels.backends.reference.optimizers import adam_step, sgd_step
from partkernels.backends.reference.random_map import random_map
from partkernels.backends.reference.subnetwork_weight import subnetwork_weight, subnetwork_weight_grad

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
