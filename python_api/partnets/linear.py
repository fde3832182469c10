"""Linear: torch.nn.Linear whose weight is partitioned."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

import partkernels
from partnets.partitioned_weight import PartitionedWeight


class Linear(PartitionedWeight, nn.Linear):
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

    Attributes:
        weight: [out_features, in_features].
        bias: [C, out_features], a row for each partition; [out_features] if C is 1.
        partition, count, active, update: see PartitionedWeight.

    Shapes:
        x [..., in_features] to [..., out_features], both of the weight's dtype.

    Raises:
        ValueError: the proportions, seed or defaults are invalid; and torch.nn.Linear's own errors.

    Example:
        >>> layer = Linear(4, 3, proportions=(0.5, 0.25, 0.25), seed=0)
        >>> layer
        Linear(in_features=4, out_features=3, bias=True, partitions=[6, 3, 3])
        >>> layer.bias.shape
        torch.Size([3, 3])
    """

    ordinary = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device=None,
        dtype=None,
        *,
        proportions: Sequence[float] = (1.0,),
        seed: int | None = None,
        defaults: str | partkernels.Defaults = "seed",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.divide(proportions, seed=seed, defaults=defaults)

    def forward(self, input: Tensor) -> Tensor:
        return self.compute(partkernels.linear, input)
