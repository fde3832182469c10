"""Linear and Bilinear: torch's, with a partitioned weight."""

from __future__ import annotations

import functools
import math

import torch.nn.functional as F
from torch import Tensor, nn

import partkernels
from partkernels import Uniform
from partnets.nn.activation_checkpoint import same_subnetwork
from partnets.nn.layer import PartitionedLayer


class Linear(PartitionedLayer, nn.Linear):
    """torch.nn.Linear, partitioned: y = x w_s^(k)^T + b_1 + ... + b_k for the live subnetwork k (Section 3).

    Args:
        in_features, out_features, bias, device, dtype: as in torch.nn.Linear.
        proportions: C numbers that sum to 1, the share of the weight's entries in each partition.
        seed: an int in [0, 2**63) that decides the partition and, with 'seed', the initial values; None draws one from
            torch's global generator.
        defaults: the values of entries that are not live. 'seed': regenerated from the seed, distributed as torch's
            initial weight; the weight starts there. 'zero': 0, with torch's initial weight. 'stored': a copy of torch's
            initial weight. Or one of partkernels' Zeros, Uniform, Normal, Stored, where the weight then starts (Zeros:
            with torch's initial weight).
        scheme: 'weight', 'node', or 'nested' with all inputs live; see partnets.partition.

    Attributes:
        weight: [out_features, in_features].
        bias: [C, out_features], a row for each partition; [out_features] if C is 1.
        partition, count, active, update: see PartitionedLayer.

    Shapes:
        x [..., in_features] to [..., out_features], both of the weight's dtype.

    Raises:
        ValueError: the proportions, seed, defaults or scheme are invalid; and torch.nn.Linear's own errors.

    Example:
        >>> layer = Linear(4, 3, proportions=(0.5, 0.25, 0.25), seed=0)
        >>> layer
        Linear(in_features=4, out_features=3, bias=True, partitions=[6, 3, 3])
        >>> layer.bias.shape
        torch.Size([3, 3])
    """

    ordinary = nn.Linear
    weights = ("weight",)
    shifts = ("bias",)
    unit_dim = -1
    unit_names = ("in_features", "out_features")

    def forward(self, input: Tensor) -> Tensor:
        return self.compute(partkernels.linear, input)


class Bilinear(PartitionedLayer, nn.Bilinear):
    """torch.nn.Bilinear, partitioned: y = x_1 w_s^(k) x_2 + b_1 + ... + b_k; the weight is rebuilt as a whole.

    Args:
        in1_features, in2_features, out_features, bias, device, dtype: as in torch.nn.Bilinear.
        proportions, seed, defaults, scheme: as in partnets.Linear.

    Attributes:
        weight: [out_features, in1_features, in2_features].
        bias, partition, count, active, update: as in partnets.Linear.

    Shapes:
        x_1 [..., in1_features] and x_2 [..., in2_features] to [..., out_features].

    Raises:
        ValueError: as in partnets.Linear.

    Example:
        >>> import torch
        >>> layer = Bilinear(4, 3, 2, proportions=(0.5, 0.5), seed=0)
        >>> layer(torch.ones(5, 4), torch.ones(5, 3)).shape
        torch.Size([5, 2])
    """

    ordinary = nn.Bilinear
    weights = ("weight",)
    shifts = ("bias",)

    def usual_distribution(self, name):
        return functools.partial(Uniform, 1 / math.sqrt(self.in1_features))

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        return same_subnetwork(self, F.bilinear(input1, input2, self.live("weight"), self.live("bias")))
