"""Fused kernels for partitioned neural networks (Mlodozeniec, Reisser and Louizos, ICLR 2023), as PyTorch operators.

Each entry of a weight belongs to one of C partitions. Subnetwork k uses the entries of partitions 1..k and default
values elsewhere. The operators compute with a subnetwork's weight without materialising it.
"""

from partkernels._version import __version__
from partkernels.arguments import InputError
from partkernels.backend.dispatch import backends, use_backend
from partkernels.channels import Channels
from partkernels.defaults import Defaults, Normal, Stored, Uniform, Zeros
from partkernels.explanation import explain
from partkernels.operators.conv import conv1d, conv2d
from partkernels.operators.conv_transpose import conv_transpose1d, conv_transpose2d
from partkernels.operators.embedding import embedding
from partkernels.operators.entries import gather_entries, scatter_entries
from partkernels.operators.linear import linear
from partkernels.operators.optimizers import adam_step, adam_steps, sgd_step, sgd_steps
from partkernels.operators.subnetwork_weight import subnetwork_weight
from partkernels.partition import NestedPartition, Partition

__all__ = [
    "Channels",
    "Defaults",
    "InputError",
    "NestedPartition",
    "Normal",
    "Partition",
    "Stored",
    "Uniform",
    "Zeros",
    "__version__",
    "adam_step",
    "adam_steps",
    "backends",
    "conv1d",
    "conv2d",
    "conv_transpose1d",
    "conv_transpose2d",
    "embedding",
    "explain",
    "gather_entries",
    "linear",
    "scatter_entries",
    "sgd_step",
    "sgd_steps",
    "subnetwork_weight",
    "use_backend",
]
