"""Conv1d, Conv2d and Conv3d: torch's, with a partitioned weight."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

import partkernels
from partkernels import Units
from partnets.nn.layer import PartitionedLayer


def _in_whole_groups(layer: nn.Module, units: Units) -> bool:
    """Whether what is live of a convolution's channels are whole groups, of inputs and outputs alike."""
    if layer.groups == 1:
        return True
    size, is_one = layer.out_channels // layer.groups, len(units.segments) == 1
    return layer.in_channels == layer.out_channels and is_one and all(end % size == 0 for end in units.segments[0])


class _Convolution(PartitionedLayer):
    """What is computed from the packed map by one of partkernels' convolutions."""

    weights = ("weight",)
    shifts = ("bias",)
    unit_names = ("in_channels", "out_channels")
    kernel: Callable[..., Tensor]

    @classmethod
    def may_be_narrow(cls, layer, outputs):
        return super().may_be_narrow(layer, outputs) and _in_whole_groups(layer, outputs)

    @classmethod
    def may_take_few(cls, layer, inputs):
        return _in_whole_groups(layer, inputs)

    @property
    def by_unit(self):
        return self.groups > 1

    def tell_size(self, layer, size):
        super().tell_size(layer, size)
        if self.groups > 1:
            layer.groups, layer.in_channels = self.groups * size // self.out_channels, size

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, None, None)

    def _conv_forward(self, input: Tensor, weight: None, bias: None) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        return self.compute(
            type(self).kernel,
            input,
            stride=self.stride,
            padding=padding,
            dilation=self.dilation,
            groups=self.groups,
        )


class Conv2d(_Convolution, nn.Conv2d):
    """torch.nn.Conv2d, partitioned: the convolution with w_s^(k) plus b_1 + ... + b_k for the live subnetwork k.

    Args:
        in_channels ... dtype: as in torch.nn.Conv2d, every padding mode included.
        proportions, seed, defaults, scheme: as in partnets.Linear.

    Attributes:
        weight: [out_channels, in_channels / groups, kernel_height, kernel_width].
        bias: [C, out_channels], a row for each partition; [out_channels] if C is 1.
        partition, count, active, update: see PartitionedLayer.

    Shapes:
        x [batch, in_channels, height, width] or without batch, of the weight's dtype, as in torch.nn.Conv2d.

    Raises:
        ValueError: the proportions, seed, defaults or scheme are invalid; and torch.nn.Conv2d's own errors.

    Example:
        >>> import torch
        >>> layer = Conv2d(3, 8, 3, padding="same", proportions=(0.75, 0.25), seed=0)
        >>> layer(torch.zeros(1, 3, 16, 16)).shape
        torch.Size([1, 8, 16, 16])
    """

    ordinary = nn.Conv2d
    unit_dim = -3
    kernel = partkernels.conv2d


class Conv1d(_Convolution, nn.Conv1d):
    """torch.nn.Conv1d, partitioned; arguments, attributes and errors as in partnets.Conv2d, in one dimension.

    Example:
        >>> import torch
        >>> Conv1d(3, 8, 3, proportions=(0.75, 0.25), seed=0)(torch.zeros(1, 3, 16)).shape
        torch.Size([1, 8, 14])
    """

    ordinary = nn.Conv1d
    unit_dim = -2
    kernel = partkernels.conv1d


class Conv3d(PartitionedLayer, nn.Conv3d):
    """torch.nn.Conv3d, partitioned; as partnets.Conv2d, in three dimensions.

    The weight is rebuilt as a whole: it is small beside the volumes that it meets.

    Example:
        >>> import torch
        >>> Conv3d(3, 8, 3, proportions=(0.75, 0.25), seed=0)(torch.zeros(1, 3, 5, 5, 5)).shape
        torch.Size([1, 8, 3, 3, 3])
    """

    ordinary = nn.Conv3d
    weights = ("weight",)
    shifts = ("bias",)
    unit_dim = -4
    unit_names = ("in_channels", "out_channels")

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, None, None)

    @classmethod
    def may_be_narrow(cls, layer, outputs):
        return layer.groups == 1 and super().may_be_narrow(layer, outputs)

    @classmethod
    def can_nest(cls, layer):
        return layer.groups == 1 and super().can_nest(layer)

    def _conv_forward(self, input: Tensor, weight: None, bias: None) -> Tensor:
        return self.compute_block(super()._conv_forward, input)
