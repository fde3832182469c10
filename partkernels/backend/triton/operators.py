"""The operators of the Triton backend.

A kernel rebuilds a subnetwork's weight in registers, tile by tile, or writes a slice of it for cuBLAS and cuDNN;
`plans` chooses between the two.
"""

from partkernels.backend.plan import use_plan
from partkernels.backend.reference.bias import grad_bias
from partkernels.backend.triton.conv2d import conv2d, conv2d_grad_input, conv2d_grad_weight
from partkernels.backend.triton.embedding import embedding
from partkernels.backend.triton.entries import gather_entries, scatter_entries
from partkernels.backend.triton.exchange import combine_rows, exchange_entries, prepared
from partkernels.backend.triton.linear import linear, linear_grad_input, linear_grad_weight
from partkernels.backend.triton.optimizers import adam_steps, counted_adam_steps, sgd_steps
from partkernels.backend.triton.plans import Config, tuning
from partkernels.backend.triton.subnetwork_weight import subnetwork_weight, subnetwork_weight_grad

__all__ = [
    "Config",
    "adam_steps",
    "combine_rows",
    "conv2d",
    "conv2d_grad_input",
    "conv2d_grad_weight",
    "counted_adam_steps",
    "embedding",
    "exchange_entries",
    "gather_entries",
    "grad_bias",
    "linear",
    "linear_grad_input",
    "linear_grad_weight",
    "prepared",
    "scatter_entries",
    "sgd_steps",
    "subnetwork_weight",
    "subnetwork_weight_grad",
    "tuning",
    "use_plan",
]
