"""ConvTranspose1d, ConvTranspose2d and ConvTranspose3d: torch's, with a partitioned weight."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partkernels
from partkernels import Partition
from partnets.nn.layer import PartitionedLayer


class _Transposed(PartitionedLayer):
    weights = ("weight",)
    shifts = ("bias",)
    unit_names = ("in_channels", "out_channels")
    kernel: Callable[..., Tensor]

    @classmethod
    def can_nest(cls, layer):
        return layer.groups == 1 and super().can_nest(layer)

    def nested_partition(self, name, shape, nesting):
        return Partition.nested(shape, self._units_or_all(nesting.inputs, shape[0], nesting), nesting.outputs)

    def live_block(self, name, value, partition, active):
        if value.dim() == 1:
            return super().live_block(name, value, partition, active)
        if self.takes_narrow:
            value = partition.row_units.take(value, 0, active)
        return partition.col_units.take(value, 1, active) if self.is_narrow else value

    def nodes(self, name, shape):
        # [in, out / groups, ...]
        group = torch.arange(shape[0], device="cpu") // (shape[0] // self.groups)
        outputs = group[:, None] * shape[1] + torch.arange(shape[1], device="cpu")
        return outputs.view(*outputs.shape, *[1] * (len(shape) - 2))

    def geometry(self, input: Tensor, output_size: Sequence[int] | None) -> dict:
        """The sizes that an operator takes; torch's own check of output_size."""
        output_padding = self._output_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, len(self.kernel_size), self.dilation
        )
        return {
            "stride": self.stride,
            "padding": self.padding,
            "output_padding": tuple(output_padding),
            "groups": self.groups,
            "dilation": self.dilation,
        }

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        return self.compute(type(self).kernel, input, **self.geometry(input, output_size))


class ConvTranspose2d(_Transposed, nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d, partitioned: the transposed convolution with w_s^(k) plus b_1 + ... + b_k.

    Args:
        in_channels ... dtype: as in torch.nn.ConvTranspose2d.
        proportions, seed, defaults, scheme: as in partnets.Linear.

    Attributes:
        weight: [in_channels, out_channels / groups, kernel_height, kernel_width].
        bias: [C, out_channels], a row for each partition; [out_channels] if C is 1.
        partition, count, active, update: see PartitionedLayer.

    Shapes:
        x [batch, in_channels, height, width] or without batch, of the weight's dtype, as in torch.nn.ConvTranspose2d.

    Raises:
        ValueError: as in partnets.Conv2d; and torch.nn.ConvTranspose2d's own errors.

    Example:
        >>> import torch
        >>> layer = ConvTranspose2d(3, 8, 3, stride=2, proportions=(0.75, 0.25), seed=0)
        >>> layer(torch.zeros(1, 3, 4, 4)).shape, layer(torch.zeros(1, 3, 4, 4), output_size=(10, 10)).shape
        (torch.Size([1, 8, 9, 9]), torch.Size([1, 8, 10, 10]))
    """

    ordinary = nn.ConvTranspose2d
    unit_dim = -3
    kernel = partkernels.conv_transpose2d


class ConvTranspose1d(_Transposed, nn.ConvTranspose1d):
    """torch.nn.ConvTranspose1d, partitioned; as partnets.ConvTranspose2d, in one dimension.

    Example:
        >>> import torch
        >>> ConvTranspose1d(3, 8, 3, proportions=(0.75, 0.25), seed=0)(torch.zeros(1, 3, 4)).shape
        torch.Size([1, 8, 6])
    """

    ordinary = nn.ConvTranspose1d
    unit_dim = -2
    kernel = partkernels.conv_transpose1d


class ConvTranspose3d(_Transposed, nn.ConvTranspose3d):
    """torch.nn.ConvTranspose3d, partitioned; as partnets.ConvTranspose2d, in three dimensions.

    The weight is rebuilt as a whole: it is small beside the volumes that it meets.

    Example:
        >>> import torch
        >>> ConvTranspose3d(3, 8, 3, proportions=(0.75, 0.25), seed=0)(torch.zeros(1, 3, 4, 4, 4)).shape
        torch.Size([1, 8, 6, 6, 6])
    """

    ordinary = nn.ConvTranspose3d
    unit_dim = -4

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        geometry = self.geometry(input, output_size)
        return self.compute_block(functools.partial(F.conv_transpose3d, **geometry), input, is_transposed=True)
