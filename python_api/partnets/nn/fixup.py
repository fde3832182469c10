"""Bias and Scale: the scalar layers of FixUp networks (Zhang et al. 2019), as torch modules for partnets.partition."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partnets.subnetworks.rules import Rule, register


class Bias(nn.Module):
    """A layer that adds a learned number, initially 0.

    Attributes:
        bias: [1].

    Shapes:
        x of any shape; returns the same shape.

    Example:
        >>> Bias()(torch.ones(2)).tolist()
        [1.0, 1.0]
    """

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def reset_parameters(self) -> None:
        """Reset the number to 0."""
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Scale(nn.Module):
    """A layer that multiplies by a learned number, initially 1.

    Attributes:
        scale: [1].

    Shapes:
        x of any shape; returns the same shape.

    Example:
        >>> Scale()(torch.ones(2)).tolist()
        [1.0, 1.0]
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def reset_parameters(self) -> None:
        """Reset the number to 1."""
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


register(Scale, Rule(scales=("scale",)))
