"""All operators, each from a file in this folder."""

from partkernels.backend.reference.bias import grad_bias
from partkernels.backend.reference.conv2d import conv2d, conv2d_grad_input, conv2d_grad_weight
from partkernels.backend.reference.defaults import drawn
from partkernels.backend.reference.embedding import embedding
from partkernels.backend.reference.entries import combine_rows, exchange_entries, gather_entries, scatter_entries
from partkernels.backend.reference.linear import linear, linear_grad_input, linear_grad_weight
from partkernels.backend.reference.optimizers import adam_steps, counted_adam_steps, sgd_steps
from partkernels.backend.reference.random_map import random_map
from partkernels.backend.reference.subnetwork_weight import subnetwork_weight, subnetwork_weight_grad

__all__ = [
    "adam_steps",
    "combine_rows",
    "conv2d",
    "conv2d_grad_input",
    "conv2d_grad_weight",
    "counted_adam_steps",
    "drawn",
    "embedding",
    "exchange_entries",
    "gather_entries",
    "grad_bias",
    "linear",
    "linear_grad_input",
    "linear_grad_weight",
    "random_map",
    "scatter_entries",
    "sgd_steps",
    "subnetwork_weight",
    "subnetwork_weight_grad",
]
