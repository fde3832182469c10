"""Initial values: how a parameter was drawn, and how it is drawn anew, from a seed or as torch has it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from partkernels import Defaults, Normal, Uniform, Zeros
from partnets.hyper import Hyperparameter, hyperparameters
from partnets.utils import seeds

# Makes the defaults of a seed, as functools.partial(Uniform, 0.1) does when it is called with seed=.
Distribution = Callable[..., Defaults]

# The fourth moment over the squared variance is 1.8 of uniform values and 3 of normal ones.
BETWEEN_UNIFORM_AND_NORMAL = 2.4
# Values that are so few different ones have been set; so many entries tell most of those that have not.
KINDS, PROBED = 4, 1000
# How many standard deviations a variance of sizes may be above the one that chance makes; and of how many entries the
# sizes must at least be, or they have no normal distribution.
DEVIATIONS, ENTRIES = 5, 16


def distribution_of(parameter: Tensor, usual: Distribution | None) -> Distribution | None:
    """The distribution that a parameter was drawn from, judged by its present values.

    Args:
        parameter: any shape; on the meta device it has no values, and counts as usual.
        usual: what torch draws such a parameter from. None if it has no such habit.

    Returns:
        `usual`, if the values look like a draw from it; else a uniform or a normal distribution of their standard
        deviation, about 0, or partkernels.Zeros if all are 0.

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
    """How a parameter started, to start so again.

    Attributes:
        values: all of them, where they are of a few kinds, as a constant, an identity, or a bias of some gates alone.
        mean, std, is_uniform: of others, which were drawn.

    Example:
        >>> import torch
        >>> start = Start.of(torch.tensor([0.0, 0.0, 1.0, 1.0]))
        >>> parameter = nn.Parameter(torch.rand(4))
        >>> start.fits(parameter)
        False
        >>> start.fill(parameter)
        >>> parameter.tolist(), start.fits(parameter)
        ([0.0, 0.0, 1.0, 1.0], True)
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

    def fits(self, parameter: Tensor) -> bool:
        """Whether a parameter looks as if it had started so."""
        if self.values is not None:
            return torch.equal(parameter.detach().to(self.values), self.values)
        other, count = Start.of(parameter), parameter.numel()
        if other.values is not None:
            return False
        least = 4 * max(self.std, other.std) / math.sqrt(count)
        return abs(self.std - other.std) < least and abs(self.mean - other.mean) < least

    @torch.no_grad()
    def fill(self, parameter: Tensor) -> None:
        """Starts a parameter so, by torch's global generator."""
        if self.values is not None:
            parameter.copy_(self.values)
        elif self.is_uniform:
            reach = self.std * math.sqrt(3)
            parameter.uniform_(self.mean - reach, self.mean + reach)
        else:
            parameter.normal_(self.mean, self.std)


def looks_learned(weight: Tensor) -> bool:
    """Whether a weight's outputs or inputs differ in size by more than chance: those of a drawn one are all alike.

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
    """Whether so many values of such a size may be a draw: no larger than any, and of its standard deviation."""
    if isinstance(of, Uniform):
        # Rounding to 8 bits, the last level's half step, and torch's own bound.
        return largest <= of.scale * 1.01 and abs(std / of.scale * math.sqrt(3) - 1) < 4 / math.sqrt(count)
    return isinstance(of, Normal) and abs(std / of.std - 1) < 4 / math.sqrt(count)


def _zeros(*, seed: int) -> Zeros:
    return Zeros()


def declared(layer: nn.Module, seed: int) -> Defaults | None:
    """What the layer's `seed_defaults` make of a seed; None if it has none. See partnets.partition.

    Raises:
        ValueError: they are neither defaults nor make any.

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
            f"seed_defaults of a {getattr(layer, 'ordinary', type(layer)).__name__} is {start!r}; set it to"
            " partkernels.Zeros(), or to what makes defaults of a seed, as functools.partial(partkernels.Normal, 0.1)"
            " does."
        )
    return made


def reinitialise(module: nn.Module) -> None:
    """Gives a module and all inside it initial values anew, drawn by torch's global generator.

    Each is reset by its own reset_parameters, children before their parents; a weight with `seed_defaults` is drawn
    from those, and the bias beside it is 0. Parameters that require no gradient keep their values, and so does all
    inside a module of partnets.hyper.

    Args:
        module: without partitions.

    Raises:
        ValueError: modules with trainable parameters of their own have neither. All are named; nothing has changed.

    Example:
        >>> layer = nn.LayerNorm(2)
        >>> _ = nn.init.zeros_(layer.weight)
        >>> reinitialise(layer)
        >>> layer.weight.tolist()
        [1.0, 1.0]
    """
    psi = {inner for one in module.modules() if isinstance(one, Hyperparameter) for inner in one.modules()}
    modules = {path: one for path, one in module.named_modules() if one not in psi and not _is_still(one)}
    stuck = [f"{path or 'itself'} ({type(one).__name__})" for path, one in modules.items() if not _knows(one)]
    if stuck:
        raise ValueError(
            f"no initial values for {', '.join(stuck)}; give the class a reset_parameters() that sets its parameters"
            " to them, as torch's layers have it."
        )
    still = {p: p.detach().clone() for p in module.parameters() if not p.requires_grad}
    still |= {p: p.detach().clone() for p in hyperparameters(module)}
    for one in reversed(modules.values()):
        if (reset := _reset(one)) is not None:
            reset()
        if (start := declared(one, seeds.random())) is not None:
            for parameter in one.parameters(recurse=False):
                fill(parameter, start if parameter.dim() > 1 else Zeros())
    with torch.no_grad():
        for parameter, value in still.items():
            parameter.copy_(value)


@torch.no_grad()
def fill(weight: Tensor, defaults: Defaults) -> None:
    """Sets a weight to its defaults."""
    weight.copy_(defaults.values(weight.shape, weight.dtype, weight.device))


def _reset(module: nn.Module):
    # torch.nn.MultiheadAttention's and Transformer's have an underscore.
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _knows(module: nn.Module) -> bool:
    """Whether a module can set its own parameters to initial values, or has none."""
    own = module._parameters.keys()
    says = getattr(module, "seed_defaults", None) is not None and own <= {"weight", "bias"}
    return not own or says or _reset(module) is not None


def _is_still(module: nn.Module) -> bool:
    """Whether a module has parameters of its own and none that learns: then its buffers stay as well."""
    own = list(module.parameters(recurse=False))
    return bool(own) and not any(parameter.requires_grad for parameter in own)
