"""ToFloat and Normalise: conversion of stored images to a network's input, before and after the augmentation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partnets.hyper.tracing import traced

# An eps that changes no variance; PyTorch 2.11 refuses 0.
NOTHING = torch.finfo(torch.float32).tiny


class ToFloat(nn.Module):
    """A layer that converts bytes to floats in [0, 1]; the first of a model, before its augmentation.

    Batches are then moved to the model's device as bytes, a quarter of the traffic.

    Shapes:
        x of any shape, uint8; returns x / 255 in float32. Floating-point x is returned unchanged.

    Raises:
        TypeError: x is neither.

    Example:
        >>> ToFloat()(torch.tensor([0, 51, 255], dtype=torch.uint8))
        tensor([0.0000, 0.2000, 1.0000])
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            return x
        if x.dtype != torch.uint8:
            raise TypeError(f"x is {x.dtype}; pass images as uint8, or as floats in [0, 1].")
        return x.float() / 255

    def to_ordinary(self) -> nn.Module:
        """Return an equal module that needs only torch; it raises AssertionError for x of another dtype."""
        return traced(BytesToFloat())


class Normalise(nn.Module):
    """A layer that computes (x - mean) / std per channel; put it after the augmentation, so that its fill is black.

    Args:
        mean, std: a number for each channel, in units of x, such as Data.mean and Data.std.

    Shapes:
        x [batch, channels, ...], floating point; returns the same shape.

    Raises:
        ValueError: mean and std differ in number, a std is not positive, or x has another number of channels.
        TypeError: x is not floating point.

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
        if not x.is_floating_point():
            raise TypeError(f"x is {x.dtype}; put data.ToFloat before the augmentation.")
        if x.shape[1] != len(self.mean):
            raise ValueError(f"x has {x.shape[1]} channels, but this Normalise has {len(self.mean)}; pass as many.")
        channels = (-1, *(1,) * (x.dim() - 2))
        return (x - self.mean.view(channels)) / self.std.view(channels)

    def to_ordinary(self) -> nn.Module:
        """Return an equal module that needs only torch, a frozen batch normalisation."""
        return traced(Standardise(self.mean, self.std))

    def extra_repr(self) -> str:
        mean, std = (tuple(round(value, 4) for value in buffer.tolist()) for buffer in (self.mean, self.std))
        return f"mean={mean}, std={std}"


class BytesToFloat(nn.Module):
    """ToFloat without branches, which torch.fx cannot trace."""

    def forward(self, x: Tensor) -> Tensor:
        is_bytes = x.dtype == torch.uint8
        torch._assert(is_bytes | x.is_floating_point(), "pass images as uint8, or as floats in [0, 1]")
        return x / (1 + 254 * is_bytes)


class Standardise(nn.Module):
    """Normalise without checks, which torch.fx cannot trace; F.batch_norm has its own."""

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("variance", std.square(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, eps=NOTHING)
