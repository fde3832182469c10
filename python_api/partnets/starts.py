"""Starts: how a parameter is distributed when it is drawn anew from a seed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from torch import Tensor

from partkernels import Defaults, Normal, Uniform, Zeros

# Makes the defaults of a seed, as functools.partial(Uniform, 0.1) does when it is called with seed=.
Start = Callable[..., Defaults]

# The fourth moment over the squared variance is 1.8 of uniform values and 3 of normal ones.
BETWEEN_UNIFORM_AND_NORMAL = 2.4


def start_of(parameter: Tensor, usual: Start | None) -> Start | None:
    """The distribution that a parameter was drawn from, judged by its present values.

    Args:
        parameter: any shape; on the meta device it has no values, and counts as usual.
        usual: what torch draws such a parameter from. None if it has no such habit.

    Returns:
        `usual`, if the values look like a draw from it; else a uniform or a normal distribution of their standard
        deviation, about 0, or partkernels.Zeros if all are 0.

    Example:
        >>> import torch
        >>> start_of(torch.nn.init.normal_(torch.empty(100, 100), std=0.02), functools.partial(Uniform, 0.1))(seed=0)
        Normal(std=0.0..., seed=0, stream=0)
    """
    if parameter.is_meta or parameter.numel() == 0:
        return usual
    values = parameter.detach().float()
    square = values.square().mean()
    std, largest = math.sqrt(square), float(values.abs().max())
    if largest == 0:
        return _zeros
    if usual is not None and _is_draw(values.numel(), std, largest, usual(seed=0)):
        return usual
    if float(values.pow(4).mean() / square**2) < BETWEEN_UNIFORM_AND_NORMAL:
        return functools.partial(Uniform, std * math.sqrt(3))
    return functools.partial(Normal, std)


def _is_draw(count: int, std: float, largest: float, of: Defaults) -> bool:
    """Whether so many values of such a size may be a draw: no larger than any, and of its standard deviation."""
    if isinstance(of, Uniform):
        # Rounding to 8 bits, the last level's half step, and torch's own bound.
        return largest <= of.scale * 1.01 and abs(std / of.scale * math.sqrt(3) - 1) < 4 / math.sqrt(count)
    return isinstance(of, Normal) and abs(std / of.std - 1) < 4 / math.sqrt(count)


def _zeros(*, seed: int) -> Zeros:
    return Zeros()
