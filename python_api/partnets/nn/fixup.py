"""Bias and Scale: FixUp's scalars of partnets.models, with one for each partition (Appendix I.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from partnets import models
from partnets.nn.layer import PartitionedLayer


class _OfAll(PartitionedLayer):
    """One number for all units: those that are not live stay 0."""

    unit_dim = 1
    keeps_units = True

    def units_of_parameter(self, name, nesting):
        return None


class Bias(_OfAll, models.Bias):
    """models.Bias that adds b_1 + ... + b_k in subnetwork k; partnets.partition makes it.

    Attributes:
        bias: [C, 1], a row for each partition; [1] if C is 1.
        count, active, update: see Partitioned.

    Example:
        >>> Bias.from_ordinary(models.Bias(), (0.8, 0.2)).bias.tolist()
        [[0.0], [0.0]]
    """

    ordinary = models.Bias
    shifts = ("bias",)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute_live(torch.add, x, "bias")


class Scale(_OfAll, models.Scale):
    """models.Scale that multiplies by s_1 * ... * s_k in subnetwork k; partnets.partition makes it.

    Attributes:
        scale: [C, 1], a row for each partition; [1] if C is 1.
        count, active, update: see Partitioned.

    Example:
        >>> Scale.from_ordinary(models.Scale(), (0.8, 0.2)).scale.tolist()
        [[1.0], [1.0]]
    """

    ordinary = models.Scale
    scales = ("scale",)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute_live(torch.mul, x, "scale")
