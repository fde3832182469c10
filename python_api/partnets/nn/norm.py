"""GroupNorm, LayerNorm and RMSNorm: torch's, with a scale and a shift for each partition."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from partnets.nn.activation_checkpoint import same_subnetwork
from partnets.nn.layer import PartitionedLayer


class GroupNorm(PartitionedLayer, nn.GroupNorm):
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

    def forward(self, input: Tensor) -> Tensor:
        y = F.group_norm(input, self.num_groups, self.live("weight"), self.live("bias"), self.eps)
        return same_subnetwork(self, y)


class LayerNorm(PartitionedLayer, nn.LayerNorm):
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

    def forward(self, input: Tensor) -> Tensor:
        y = F.layer_norm(input, self.normalized_shape, self.live("weight"), self.live("bias"), self.eps)
        return same_subnetwork(self, y)


class RMSNorm(PartitionedLayer, nn.RMSNorm):
    """torch.nn.RMSNorm with the scale s_1 * ... * s_k of subnetwork k (Appendix I.2).

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as in torch.nn.RMSNorm.
        proportions: as in partnets.GroupNorm.

    Attributes:
        weight: [C, *normalized_shape], the row s_i for each partition, all 1 at the start; [*normalized_shape] if C
            is 1, and None without elementwise_affine.
        count, active, update: see Partitioned.

    Shapes:
        x [..., *normalized_shape] to the same.

    Raises:
        ValueError: the proportions are invalid; and torch.nn.RMSNorm's own errors.

    Example:
        >>> import torch
        >>> layer = RMSNorm(4, proportions=(0.8, 0.2))
        >>> layer.weight.shape, layer(torch.randn(5, 4)).shape
        (torch.Size([2, 4]), torch.Size([5, 4]))
    """

    ordinary = nn.RMSNorm
    scales = ("weight",)

    def forward(self, x: Tensor) -> Tensor:
        return same_subnetwork(self, F.rms_norm(x, self.normalized_shape, self.live("weight"), self.eps))
