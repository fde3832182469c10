"""HyperConv1d, HyperConv2d, HyperConv3d: torch's convolutions as best responses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partnets.stn.layer import HyperLayer
from partnets.stn.vector import is_each

# Examples' own kernels are formed if a row of a kernel has at most this many entries per output position: then one
# convolution with a group for each example costs less than two of the batch.
MERGED = 2.5
# Bytes of kernels at a time: they are read three times, and a core's cache holds this many.
MERGED_BYTES = 1 << 20


@dataclass(frozen=True)
class _Convolution:
    """The product torch.convolution of x [batch, channels, *size]."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    rows_dim = 1

    def __call__(self, x, weight):
        return torch.convolution(x, weight, None, *self._geometry(self.groups))

    def add(self, y, x, weight):
        return y.add_(self(x, weight))

    def gradients(self, grad, x, weight, needs):
        return self._gradients(grad, x, weight, needs, self.groups)

    def at_a_time(self, x, weight):
        sizes = zip(x.shape[2:], self.padding, self.dilation, weight.shape[2:], self.stride, strict=True)
        positions = 1
        for size, padding, dilation, kernel, stride in sizes:
            positions *= (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        if len(x) == 0 or weight[0].numel() > MERGED * positions:
            return 0
        return max(1, MERGED_BYTES // (weight.numel() * weight.element_size()))

    def each(self, x, weights):
        y = torch.convolution(_as_one(x), weights.flatten(0, 1), None, *self._geometry(self.groups * len(x)))
        return y.reshape(len(x), -1, *y.shape[2:])

    def each_gradients(self, grad, x, weights, needs):
        groups = self.groups * len(x)
        grad_x, grad_weights = self._gradients(_as_one(grad), _as_one(x), weights.flatten(0, 1), needs, groups)
        return (
            None if grad_x is None else grad_x.reshape(x.shape),
            None if grad_weights is None else grad_weights.reshape(weights.shape),
        )

    def _geometry(self, groups):
        return self.stride, self.padding, self.dilation, False, (0,) * len(self.stride), groups

    def _gradients(self, grad, x, weight, needs, groups):
        mask = [*needs, False]
        found = torch.ops.aten.convolution_backward(grad, x, weight, None, *self._geometry(groups), mask)
        return found[0], found[1]


def _as_one(x: Tensor) -> Tensor:
    """Reshape a batch to one example that has all examples' channels."""
    return x.reshape(1, -1, *x.shape[2:])


class _HyperConvolution(HyperLayer):
    """The base of the three convolutions.

    Args:
        in_channels ... dtype: as in torch's layer, including every padding mode.
        hyper: the stn.HyperVector λ that the layer reads.

    Attributes:
        weight, hyper_weight, weight_scale, bias, hyper_bias, bias_scale: as in stn.HyperLinear; a row is an output
            channel.

    Raises:
        ValueError: each example has its own λ, and x has another number of examples.
    """

    def forward(self, input: Tensor) -> Tensor:
        input, hyper = self.given(input, -len(self.kernel_size) - 1)
        if not is_each(hyper):
            return self._conv_forward(input, self.merged("weight", hyper), self.merged("bias", hyper))
        if input.dim() != len(self.kernel_size) + 2 or self.vector.batch_dim % input.dim() != 0:
            raise ValueError(
                f"x is {list(input.shape)}, but each example has its own hyperparameters; pass x as [batch,"
                " channels, ...], and batch_dim=0 to stn.convert."
            )
        # Padding before and after each dimension, the last dimension first.
        around = self._reversed_padding_repeated_twice
        front, behind = tuple(around[-2::-2]), tuple(around[::-2])
        if self.padding_mode != "zeros":
            input, front = F.pad(input, around, mode=self.padding_mode), (0,) * len(front)
        elif front != behind:
            input, front = F.pad(input, around), (0,) * len(front)
        return self.responded(input, hyper, _Convolution(self.stride, front, self.dilation, self.groups))


class HyperConv1d(_HyperConvolution, nn.Conv1d):
    __doc__ = (
        "torch.nn.Conv1d as a best response, each example with its own kernel.\n"
        + (_HyperConvolution.__doc__ or "").partition("\n")[2]
        + """
    Example:
        >>> from partnets import hyper, stn
        >>> vector = stn.HyperVector(hyper.ConcreteDropout(0.5))
        >>> HyperConv1d(3, 8, 3, hyper=vector)(torch.ones(2, 3, 16)).shape
        torch.Size([2, 8, 14])
    """
    )

    ordinary = nn.Conv1d


class HyperConv2d(_HyperConvolution, nn.Conv2d):
    __doc__ = (
        "torch.nn.Conv2d as a best response, each example with its own kernel.\n"
        + (_HyperConvolution.__doc__ or "").partition("\n")[2]
        + """
    Example:
        >>> from partnets import hyper, stn
        >>> vector = stn.HyperVector(hyper.ConcreteDropout(0.5))
        >>> HyperConv2d(3, 8, 3, padding="same", hyper=vector)(torch.ones(2, 3, 16, 16)).shape
        torch.Size([2, 8, 16, 16])
    """
    )

    ordinary = nn.Conv2d


class HyperConv3d(_HyperConvolution, nn.Conv3d):
    __doc__ = (
        "torch.nn.Conv3d as a best response, each example with its own kernel.\n"
        + (_HyperConvolution.__doc__ or "").partition("\n")[2]
        + """
    Example:
        >>> from partnets import hyper, stn
        >>> vector = stn.HyperVector(hyper.ConcreteDropout(0.5))
        >>> HyperConv3d(3, 8, 3, hyper=vector)(torch.ones(2, 3, 5, 5, 5)).shape
        torch.Size([2, 8, 3, 3, 3])
    """
    )

    ordinary = nn.Conv3d
