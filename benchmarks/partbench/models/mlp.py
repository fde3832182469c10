"""MLP: a network of fully connected layers."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from torch import nn

from partkernels import Uniform


class MLP(nn.Sequential):
    """The network of the input selection experiments (Appendix I.3), 74 242 parameters for 30 inputs; returns logits.

    Initial weights are U[-b, b] with b = sqrt(6 / fan_in), also if `partnets.partition` draws them from a seed, and
    initial biases are 0 (He et al. 2015).

    Args:
        in_features: features of each example.
        hidden: the width of each hidden layer.
        classes: number of logits.

    Shapes:
        x [..., in_features]; returns [..., classes]. For images, put a torch.nn.Flatten in front.

    Example:
        >>> import torch
        >>> MLP(30)(torch.zeros(5, 30)).shape
        torch.Size([5, 2])
    """

    def __init__(self, in_features: int, hidden: Sequence[int] = (256, 256), classes: int = 2) -> None:
        layers, fan_in = [], in_features
        for width in hidden:
            layers += [_linear(fan_in, width), nn.GELU()]
            fan_in = width
        super().__init__(*layers, _linear(fan_in, classes))


def _linear(in_features: int, out_features: int) -> nn.Linear:
    layer = nn.Linear(in_features, out_features)
    bound = math.sqrt(6 / in_features)
    nn.init.uniform_(layer.weight, -bound, bound)
    # He et al. derive their bound for biases of 0.
    nn.init.zeros_(layer.bias)
    layer.seed_defaults = functools.partial(Uniform, bound)
    return layer
