"""Partitioned best responses: partnets.partition partitions W, W_hyper, V and C.

So subnetwork k - 1 and its response have not seen chunk k, and D_k tunes λ without a validation set.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NoReturn

from torch import nn

from partkernels import Normal
from partnets.nn.attention import MultiheadAttention
from partnets.nn.embedding import Table
from partnets.nn.layer import PartitionedLayer
from partnets.nn.recurrent import Recurrent
from partnets.nn.registry import register
from partnets.stn.attention import HyperMultiheadAttention
from partnets.stn.conv import HyperConv1d, HyperConv2d, HyperConv3d
from partnets.stn.embedding import HyperEmbedding
from partnets.stn.layer import SCALE_STD
from partnets.stn.linear import HyperLinear
from partnets.stn.norm import (
    HyperBatchNorm1d,
    HyperBatchNorm2d,
    HyperBatchNorm3d,
    HyperGroupNorm,
    HyperLayerNorm,
    HyperRMSNorm,
)
from partnets.stn.recurrent import HyperGRU, HyperLSTM, HyperRNN
from partnets.utils import seeds


def _base(name: str) -> str:
    """Return the name of the parameter that NAME, hyper_NAME or NAME_scale belongs to."""
    return name.removeprefix("hyper_").removesuffix("_scale")


class PartitionedHyperLayer(PartitionedLayer):
    """The base of partitioned best responses; V and C are partitioned like weights, W_hyper like W, b_hyper like b."""

    def live(self, name):
        return super().live(name) if name in self._parameters else None

    @property
    def weights(self) -> Sequence[str]:
        names = [name for name in self.responding if self.is_weight(name)]
        scales = [f"{name}_scale" for name in self.responding]
        return (*names, *(f"hyper_{name}" for name in names), *scales)

    @property
    def shifts(self) -> Sequence[str]:
        names = [name for name in self.responding if not self.is_weight(name)]
        responses = (f"hyper_{name}" for name in names)
        return *(name for name in names if name not in self.scales), *responses

    def is_weight(self, name: str) -> bool:
        """Return whether a parameter is partitioned entry by entry."""
        return "bias" not in name

    def divided(self, name, weight, proportions, seed, scheme):
        # An entry of W_hyper belongs to the partition of W's entry; with scheme 'node', all of an output to one.
        return super().divided(_base(name), weight, proportions, seed, scheme)

    def usual_distribution(self, name):
        if name.endswith("_scale"):
            return functools.partial(Normal, SCALE_STD)
        return super().usual_distribution(_base(name))


class _PartitionedHyperNorm(PartitionedHyperLayer):
    scales = ("weight",)

    def is_weight(self, name):
        return False

    def usual_distribution(self, name):
        return functools.partial(Normal, SCALE_STD) if name.endswith("_scale") else None


class PartitionedHyperLinear(PartitionedHyperLayer, HyperLinear):
    """stn.HyperLinear, partitioned."""

    ordinary = HyperLinear


class PartitionedHyperConv1d(PartitionedHyperLayer, HyperConv1d):
    """stn.HyperConv1d, partitioned."""

    ordinary = HyperConv1d


class PartitionedHyperConv2d(PartitionedHyperLayer, HyperConv2d):
    """stn.HyperConv2d, partitioned."""

    ordinary = HyperConv2d


class PartitionedHyperConv3d(PartitionedHyperLayer, HyperConv3d):
    """stn.HyperConv3d, partitioned."""

    ordinary = HyperConv3d


class PartitionedHyperEmbedding(PartitionedHyperLayer, Table, HyperEmbedding):
    """stn.HyperEmbedding, partitioned."""

    ordinary = HyperEmbedding
    rows = HyperEmbedding.rows


class PartitionedHyperLayerNorm(_PartitionedHyperNorm, HyperLayerNorm):
    """stn.HyperLayerNorm, partitioned."""

    ordinary = HyperLayerNorm


class PartitionedHyperRMSNorm(_PartitionedHyperNorm, HyperRMSNorm):
    """stn.HyperRMSNorm, partitioned."""

    ordinary = HyperRMSNorm


class PartitionedHyperGroupNorm(_PartitionedHyperNorm, HyperGroupNorm):
    """stn.HyperGroupNorm, partitioned."""

    ordinary = HyperGroupNorm


class PartitionedHyperRNN(PartitionedHyperLayer, Recurrent, HyperRNN):
    """stn.HyperRNN, partitioned."""

    ordinary = HyperRNN
    flat_weight = HyperRNN.flat_weight


class PartitionedHyperLSTM(PartitionedHyperLayer, Recurrent, HyperLSTM):
    """stn.HyperLSTM, partitioned."""

    ordinary = HyperLSTM
    flat_weight = HyperLSTM.flat_weight


class PartitionedHyperGRU(PartitionedHyperLayer, Recurrent, HyperGRU):
    """stn.HyperGRU, partitioned."""

    ordinary = HyperGRU
    flat_weight = HyperGRU.flat_weight


class PartitionedHyperMultiheadAttention(PartitionedHyperLayer, HyperMultiheadAttention):
    """stn.HyperMultiheadAttention, partitioned."""

    ordinary = HyperMultiheadAttention

    def divide(self, proportions, *, seed, **options):
        seed = seeds.random() if seed is None else seed
        super().divide(proportions, seed=seed, **options)
        seed = seeds.derived(seed, "out_proj")
        self.out_proj = PartitionedHyperLinear.from_ordinary(self.out_proj, proportions, seed=seed, **options)

    def to_ordinary(self, active):
        new = PartitionedLayer.to_ordinary(self, active)
        new.out_proj = self.out_proj.to_ordinary(active)
        return new

    def to_fresh(self):
        new = super().to_fresh()
        new.out_proj = self.out_proj.to_fresh()
        return new

    def usual_distribution(self, name):
        if name.endswith("_scale"):
            return super().usual_distribution(name)
        return MultiheadAttention.usual_distribution(self, _base(name))


def _refused(layer: nn.Module, *_, **__) -> NoReturn:
    raise ValueError(
        f"a {type(layer).__name__} has running statistics of all chunks; name it in stn.convert skip=, so that"
        " partnets.partition keeps statistics for each subnetwork, or use nn.GroupNorm."
    )


for norm in (HyperBatchNorm1d, HyperBatchNorm2d, HyperBatchNorm3d):
    register(norm, _refused)
