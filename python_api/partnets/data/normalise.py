"""Layers for a network's input, before and after the augmentation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partnets.hyper.tracing import traced


class ToFloat(nn.Module):
    """A layer that converts bytes to floats in [0, 1]; the first of a model, before its augmentation.

    Batches are then moved to the model's device as bytes, a quarter of the traffic.

    Shapes:
        x of any shape, uint8; returns x / 255 in float32. Floating-point x keeps its values.

    Raises:
        AssertionError: x is neither.

    Example:
        >>> ToFloat()(torch.tensor([0, 51, 255], dtype=torch.uint8))
        tensor([0.0000, 0.2000, 1.0000])
    """

    def forward(self, x: Tensor) -> Tensor:
        # Without branches, which torch.fx cannot trace.
        is_bytes = x.dtype == torch.uint8
        torch._assert(is_bytes | x.is_floating_point(), "pass images as uint8, or as floats in [0, 1]")
        return x / (1 + 254 * is_bytes)

    def to_torch(self) -> nn.Module:
        """Return an equal module that needs only torch."""
        return traced(self)


class Normalise(nn.Module):
    """A layer that computes (x - mean) / std per channel; put it after the augmentation, so that its fill is black.

    Args:
        mean, std: a number for each channel, in units of x, such as Data.mean and Data.std.

    Shapes:
        x [batch, channels, ...], floating point; returns the same shape.

    Raises:
        ValueError: mean and std differ in number, or a std is not positive.
        AssertionError: x is not floating point, or has another number of channels.

    Example:
        >>> Normalise(mean=(0.5, 0.4), std=(0.5, 0.2))(torch.ones(1, 2, 1, 1)).flatten()
        tensor([1., 3.])
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std):
            raise ValueError(f"{len(mean)} means and {len(std)} stds; pass one of each for every channel.")
        if not all(value > 0 for value in std):
            raise ValueError(f"std={tuple(std)}; pass positive numbers.")
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.is_floating_point(), "x has no floats; put data.ToFloat before the augmentation")
        torch._assert(x.shape[1] == self.mean.shape[0], "x has another number of channels than this Normalise")
        return ((x.transpose(1, -1) - self.mean) / self.std).transpose(1, -1)

    def to_torch(self) -> nn.Module:
        """Return an equal module that needs only torch."""
        return traced(self)

    def extra_repr(self) -> str:
        mean, std = (tuple(round(value, 4) for value in buffer.tolist()) for buffer in (self.mean, self.std))
        return f"mean={mean}, std={std}"
