"""Conv1D: that of transformers (GPT-2), a linear layer that keeps its weight transposed. Needs transformers."""

from __future__ import annotations

import functools

from torch import Tensor
from transformers.pytorch_utils import Conv1D as _Conv1D

import partkernels
from partkernels import Normal
from partnets.nn.layer import PartitionedLayer


class Conv1D(PartitionedLayer, _Conv1D):
    """transformers' Conv1D, partitioned: y = x w_s^(k) + b_1 + ... + b_k for the live subnetwork k.

    Args:
        nf, nx: as in transformers, the numbers of outputs and inputs.
        proportions, seed, defaults, scheme: as in partnets.Linear.

    Attributes:
        weight: [nx, nf]; its partition is that of the transpose, [nf, nx].
        bias: [C, nf], a row for each partition; [nf] if C is 1.
        partition, count, active, update: see PartitionedLayer.

    Shapes:
        x [..., nx] to [..., nf].
    """

    ordinary = _Conv1D
    weights = ("weight",)
    shifts = ("bias",)
    unit_dim = -1
    unit_names = ("nx", "nf")

    def oriented(self, weight: Tensor) -> Tensor:
        return weight.t()

    def usual_distribution(self, name):
        return functools.partial(Normal, 0.02) if name == "weight" else None

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(partkernels.linear, x)
