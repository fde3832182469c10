"""GroupNorm, LayerNorm and RMSNorm: torch's, with a scale and a shift for each partition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partnets.nn.layer import PartitionedLayer


def group_norm(x: Tensor, size: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """F.group_norm in groups of so many channels, the last of which may have fewer.

    Example:
        >>> x = torch.randn(2, 6, 4)
        >>> y = group_norm(x, 4, None, None, 1e-5)
        >>> torch.allclose(y[:, 4:], F.group_norm(x[:, 4:], 1))
        True
    """
    channels = int(x.shape[1]) if torch.jit.is_tracing() else x.shape[1]  # a tensor there
    groups, rest = divmod(channels, size)
    if not rest:
        return F.group_norm(x, groups, weight, bias, eps)
    if not groups:
        return F.group_norm(x, 1, weight, bias, eps)
    cuts = slice(0, groups * size), slice(groups * size, None)
    parts = []
    for cut, number in zip(cuts, (groups, 1), strict=True):
        affine = (None if one is None else one[cut] for one in (weight, bias))
        parts.append(F.group_norm(x[:, cut], number, *affine, eps))
    return torch.cat(parts, 1)


class _Norm(PartitionedLayer):
    """Norms over several units, of which those that are not live stay 0, and are not counted."""

    scales = ("weight",)
    shifts = ("bias",)
    keeps_units = True


class _LastDim(_Norm):
    unit_dim = -1

    @classmethod
    def can_nest(cls, layer):
        return len(layer.normalized_shape) == 1 and super().can_nest(layer)

    @classmethod
    def made_units(cls, layer):
        return layer.normalized_shape[0]

    def tell_size(self, norm, size):
        norm.normalized_shape = (size,)

    def shape_of(self, x: Tensor) -> tuple[int, ...]:
        """Over which last dimensions x is normalised: of live units, all that it has."""
        return self.normalized_shape if self.nesting is None else x.shape[-1:]


class UnevenGroupNorm(nn.GroupNorm):
    """torch.nn.GroupNorm whose last group has fewer channels, as partnets.merge makes it of a nested subnetwork."""

    group_size: int

    def forward(self, input: Tensor) -> Tensor:
        return group_norm(input, self.group_size, self.weight, self.bias, self.eps)


class GroupNorm(_Norm, nn.GroupNorm):
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
    unit_dim = 1
    unit_names = ("num_channels",)

    def forward(self, input: Tensor) -> Tensor:
        size = self.num_channels // self.num_groups

        def norm(x: Tensor, *affine: Tensor) -> Tensor:
            if self.nesting is None:
                return F.group_norm(x, self.num_groups, *affine, self.eps)
            return group_norm(x, size, *affine, self.eps)

        return self.compute_live(norm, input, "weight", "bias")

    @classmethod
    def can_take(cls, layer, units):
        return len(units.segments) == 1  # else groups would be other ones in each subnetwork

    def tell_size(self, norm, size):
        group, norm.num_channels = self.num_channels // self.num_groups, size
        norm.num_groups = max(size // group, 1)
        if size > group and size % group:
            norm.__class__, norm.group_size = UnevenGroupNorm, group


class LayerNorm(_LastDim, nn.LayerNorm):
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

    def forward(self, input: Tensor) -> Tensor:
        def norm(x: Tensor, *affine: Tensor) -> Tensor:
            return F.layer_norm(x, self.shape_of(x), *affine, self.eps)

        return self.compute_live(norm, input, "weight", "bias")


class RMSNorm(_LastDim, nn.RMSNorm):
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
    shifts = ()

    def forward(self, x: Tensor) -> Tensor:
        def norm(x: Tensor, *affine: Tensor) -> Tensor:
            return F.rms_norm(x, self.shape_of(x), *affine, self.eps)

        return self.compute_live(norm, x, "weight")
