"""Fused kernels for partitioned neural networks (Mlodozeniec, Reisser and Louizos, ICLR 2023), as PyTorch operators.

Each entry of a weight belongs to one of C partitions. Subnetwork k uses the entries of partitions 1..k and a default
value elsewhere. The operators compute with a subnetwork's weight without ever materialising it.
"""

from partkernels._version import __version__
from partkernels.conv2d import conv1d, conv2d
from partkernels.conv_transpose2d import conv_transpose1d, conv_transpose2d
from partkernels.defaults import Defaults, Normal, Stored, Uniform, Zeros
from partkernels.dispatch import backends, use_backend
from partkernels.embedding import embedding
from partkernels.explain import explain
from partkernels.linear import linear
from partkernels.operators import InputError
from partkernels.optimizers import adam_step, sgd_step
from partkernels.partition import Partition
from partkernels.subnetwork_weight import subnetwork_weight

__all__ = [
    "Defaults",
    "InputError",
    "Normal",
    "Partition",
    "Stored",
    "Uniform",
    "Zeros",
    "__version__",
    "adam_step",
    "backends",
    "conv1d",
    "conv2d",
    "conv_transpose1d",
    "conv_transpose2d",
    "embedding",
    "explain",
    "linear",
    "sgd_step",
    "subnetwork_weight",
    "use_backend",
]
