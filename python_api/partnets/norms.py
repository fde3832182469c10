"""GroupNorm and LayerNorm: torch's, with a scale and a shift for each partition."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from partnets.partitioned_rows import PartitionedRows
from partnets.recomputation import same_subnetwork


class GroupNorm(PartitionedRows, nn.GroupNorm):
    """torch.nn.GroupNorm with the scale s_1 * ... * s_k and the shift b_1 + ... + b_k of subnetwork k (Appendix I.2).

    Args:
        num_groups, num_channels, eps, affine, device, dtype, bias: as in torch.nn.GroupNorm.
        proportions: C numbers that sum to 1. Only their number counts: each partition has a scale and a shift.

    Attributes:
        weight: [C, num_channels], the row s_i for each partition, all 1 at the start; [num_channels] if C is 1, and
            None without affine.
        bias: as weight, for b_i, all 0 at the start; None also without bias.
        count, active, update: see Partitioned.

    Shapes:
        x [batch, num_channels, ...] to the same.

    Raises:
        ValueError: the proportions are invalid; and torch.nn.GroupNorm's own errors.

    Example:
        >>> import torch
        >>> layer = GroupNorm(2, 4, proportions=(0.8, 0.1, 0.1))
        >>> layer.weight.shape, layer(torch.randn(5, 4, 8, 8)).shape
        (torch.Size([3, 4]), torch.Size([5, 4, 8, 8]))
    """

    ordinary = nn.GroupNorm
    scales = ("weight",)
    shifts = ("bias",)

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device=None,
        dtype=None,
        *,
        bias: bool = True,
        proportions: Sequence[float] = (1.0,),
    ) -> None:
        without = {} if bias else {"bias": False}  # earlier versions of PyTorch have no such argument
        super().__init__(num_groups, num_channels, eps, affine, device, dtype, **without)
        self.divide(proportions)

    def forward(self, input: Tensor) -> Tensor:
        y = F.group_norm(input, self.num_groups, self.live("weight"), self.live("bias"), self.eps)
        return same_subnetwork(self, y)


class LayerNorm(PartitionedRows, nn.LayerNorm):
    """torch.nn.LayerNorm with the scale s_1 * ... * s_k and the shift b_1 + ... + b_k of subnetwork k (Appendix I.2).

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as in torch.nn.LayerNorm.
        proportions: as in partnets.GroupNorm.

    Attributes:
        weight: [C, *normalized_shape], the row s_i for each partition, all 1 at the start; [*normalized_shape] if C
            is 1, and None without elementwise_affine.
        bias: as weight, for b_i, all 0 at the start; None also without bias.
        count, active, update: see Partitioned.

    Shapes:
        x [..., *normalized_shape] to the same.

    Raises:
        ValueError: the proportions are invalid; and torch.nn.LayerNorm's own errors.

    Example:
        >>> import torch
        >>> layer = LayerNorm(4, bias=False, proportions=(0.8, 0.2))
        >>> layer.weight.shape, layer(torch.randn(5, 4)).shape
        (torch.Size([2, 4]), torch.Size([5, 4]))
    """

    ordinary = nn.LayerNorm
    scales = ("weight",)
    shifts = ("bias",)

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device=None,
        dtype=None,
        *,
        proportions: Sequence[float] = (1.0,),
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.divide(proportions)

    def forward(self, input: Tensor) -> Tensor:
        y = F.layer_norm(input, self.normalized_shape, self.live("weight"), self.live("bias"), self.eps)
        return same_subnetwork(self, y)
