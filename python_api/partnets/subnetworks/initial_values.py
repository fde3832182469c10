"""Initial values: estimate the distribution of a parameter, and draw it again, from a seed or as torch does."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from partkernels import Defaults, Normal, Uniform, Zeros

# A function that returns defaults when it is called with seed=, such as functools.partial(Uniform, 0.1).
Distribution = Callable[..., Defaults]

# The fourth moment over the squared variance is 1.8 of uniform values and 3 of normal ones.
BETWEEN_UNIFORM_AND_NORMAL = 2.4
# A parameter with at most KINDS different values was set, not drawn. PROBED entries suffice to rule out most others.
KINDS, PROBED = 4, 1000
# How many standard deviations the variance of mean squares may exceed that of random weights; and the number of entries
# from which mean squares are nearly normal.
DEVIATIONS, ENTRIES = 5, 16


def distribution_of(parameter: Tensor, usual: Distribution | None) -> Distribution | None:
    """Return the distribution that a parameter was drawn from, estimated from its current values.

    Args:
        parameter: any shape; on the meta device it has no values, and the result is `usual`.
        usual: the distribution from which torch draws such a parameter; None if torch does not draw it.

    Returns:
        `usual`, if the values look like a draw from it; otherwise a uniform or normal distribution with mean 0 and
        their standard deviation, or partkernels.Zeros if all are 0.

    Example:
        >>> import torch
        >>> drawn = torch.nn.init.normal_(torch.empty(100, 100), std=0.02)
        >>> distribution_of(drawn, functools.partial(Uniform, 0.1))(seed=0)
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


def is_of_few_kinds(parameter: Tensor) -> bool:
    """Return whether a parameter has so few different values that they were set, such as those of an identity."""
    values = parameter.detach().flatten()
    most = max(1, min(KINDS, len(values) // 2))
    return len(values[:PROBED].unique()) <= most and len(values.unique()) <= most


@dataclass(frozen=True)
class Start:
    """The initial values of a parameter, or their distribution.

    Attributes:
        values: all values, if only a few differ, as in a constant, an identity, or a bias of some gates; else None.
        mean, std, is_uniform: the distribution of other values.

    Example:
        >>> import torch
        >>> start = Start.of(torch.tensor([0.0, 0.0, 1.0, 1.0]))
        >>> parameter = nn.Parameter(torch.rand(4))
        >>> start.fill(parameter)
        >>> parameter.tolist()
        [0.0, 0.0, 1.0, 1.0]
    """

    values: Tensor | None
    mean: float
    std: float
    is_uniform: bool

    @classmethod
    def of(cls, parameter: Tensor) -> Start:
        values = parameter.detach().double().flatten()
        mean, std = float(values.mean()), float(values.std(correction=0))
        kurtosis = float(((values - mean) / std).pow(4).mean()) if std else 0.0
        kept = parameter.detach().clone() if is_of_few_kinds(values) else None
        return cls(kept, mean, std, kurtosis < BETWEEN_UNIFORM_AND_NORMAL)

    @torch.no_grad()
    def fill(self, parameter: Tensor) -> None:
        """Set a parameter to such initial values, by torch's global generator."""
        if self.values is not None:
            parameter.copy_(self.values)
        elif self.is_uniform:
            reach = self.std * math.sqrt(3)
            parameter.uniform_(self.mean - reach, self.mean + reach)
        else:
            parameter.normal_(self.mean, self.std)


def looks_learned(weight: Tensor) -> bool:
    """Return whether a weight seems to have been trained rather than drawn at random.

    Then the mean squares of its rows (outputs) or columns (inputs) differ from each other by more than chance explains.
    Weights of fewer than two dimensions, and small ones, give False.

    Example:
        >>> import torch
        >>> drawn = torch.nn.init.normal_(torch.empty(50, 50), std=0.02)
        >>> looks_learned(drawn), looks_learned(drawn * torch.linspace(0.5, 1.5, 50))
        (False, True)
    """
    if weight.is_meta or weight.dim() < 2:
        return False
    squares = weight.detach().double().square()
    for of_each in (squares.flatten(1), squares.movedim(1, 0).flatten(1)):
        units, entries = of_each.shape
        if units > 1 and entries >= ENTRIES and (spread := float(of_each.var(correction=0))):
            error = 2 / (9 * (units - 1))  # of the cube root of a chi-squared number (Wilson and Hilferty 1931)
            by_chance = (1 - error + DEVIATIONS * math.sqrt(error)) ** 3
            if float(of_each.mean(1).var()) * entries / spread > by_chance:
                return True
    return False


def _is_draw(count: int, std: float, largest: float, of: Defaults) -> bool:
    """Return whether values of this number, standard deviation and largest size may be a draw from `of`."""
    if isinstance(of, Uniform):
        # Rounding to 8 bits, the last level's half step, and torch's own bound.
        return largest <= of.scale * 1.01 and abs(std / of.scale * math.sqrt(3) - 1) < 4 / math.sqrt(count)
    return isinstance(of, Normal) and abs(std / of.std - 1) < 4 / math.sqrt(count)


def _zeros(*, seed: int) -> Zeros:
    return Zeros()


def declared(layer: nn.Module, seed: int) -> Defaults | None:
    """Return the defaults that a layer's `seed_defaults` give for a seed, or None. See partnets.partition.

    Raises:
        ValueError: `seed_defaults` is neither an object of defaults nor a function that returns one.

    Example:
        >>> import functools, partkernels
        >>> layer = nn.Linear(2, 2)
        >>> layer.seed_defaults = functools.partial(partkernels.Normal, 0.1)
        >>> declared(layer, seed=3)
        Normal(std=0.1, seed=3, stream=0)
    """
    start = getattr(layer, "seed_defaults", None)
    if start is None:
        return None
    made = start(seed=seed) if callable(start) else start
    if not isinstance(made, Defaults):
        raise ValueError(
            f"seed_defaults of a {type(layer).__name__} is {start!r}; set it to partkernels.Zeros(), or to a function"
            " of seed= that returns defaults, such as functools.partial(partkernels.Normal, 0.1)."
        )
    return made


def reset_of(module: nn.Module) -> Callable[[], None] | None:
    """Return the method of a module that sets its parameters to initial values, or None."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


@torch.no_grad()
def fill(weight: Tensor, defaults: Defaults) -> None:
    """Set a weight to its defaults."""
    weight.copy_(defaults.values(weight.shape, weight.dtype, weight.device))
