"""The Triton backend: fused kernels for any GPU that Triton compiles for.

A kernel rebuilds the weight of a subnetwork in registers, tile by tile, or a slice of it for cuBLAS and cuDNN; `plans`
says which. Under TRITON_INTERPRET=1 all of it runs on the CPU, slowly: that is how it is tested without a GPU.
"""

from partkernels.plan import use_plan
from partkernels.reference import linear_grad_bias
from partkernels.triton.conv2d import conv2d, conv2d_grad_input, conv2d_grad_weight
from partkernels.triton.embedding import embedding
from partkernels.triton.linear import linear, linear_grad_input, linear_grad_weight
from partkernels.triton.optimizers import adam_step, sgd_step
from partkernels.triton.plans import Config, tuning
from partkernels.triton.subnetwork_weight import subnetwork_weight, subnetwork_weight_grad

__all__ = [
    "Config",
    "adam_step",
    "conv2d",
    "conv2d_grad_input",
    "conv2d_grad_weight",
    "embedding",
    "linear",
    "linear_grad_bias",
    "linear_grad_input",
    "linear_grad_weight",
    "sgd_step",
    "subnetwork_weight",
    "subnetwork_weight_grad",
    "tuning",
    "use_plan",
]
