"""Conv2d: torch.nn.Conv2d whose weight is partitioned."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

import partkernels
from partnets.partitioned_weight import PartitionedWeight


class Conv2d(PartitionedWeight, nn.Conv2d):
    """torch.nn.Conv2d, partitioned: the convolution with w_s^(k) plus b_1 + ... + b_k for the live subnetwork k.

    Args:
        in_channels ... dtype: as in torch.nn.Conv2d, every padding mode included.
        proportions, seed, defaults: as in partnets.Linear.

    Attributes:
        weight: [out_channels, in_channels / groups, kernel_height, kernel_width].
        bias: [C, out_channels], a row for each partition; [out_channels] if C is 1.
        partition, count, active, update: see PartitionedWeight.

    Shapes:
        x [batch, in_channels, height, width] or without batch, of the weight's dtype, as in torch.nn.Conv2d.

    Raises:
        ValueError: the proportions, seed or defaults are invalid; and torch.nn.Conv2d's own errors.

    Example:
        >>> import torch
        >>> layer = Conv2d(3, 8, 3, padding="same", proportions=(0.75, 0.25), seed=0)
        >>> layer(torch.zeros(1, 3, 16, 16)).shape
        torch.Size([1, 8, 16, 16])
    """

    ordinary = nn.Conv2d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device=None,
        dtype=None,
        *,
        proportions: Sequence[float] = (1.0,),
        seed: int | None = None,
        defaults: str | partkernels.Defaults = "seed",
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self.divide(proportions, seed=seed, defaults=defaults)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        return self.compute(
            partkernels.conv2d,
            input,
            stride=self.stride,
            padding=padding,
            dilation=self.dilation,
            groups=self.groups,
        )
