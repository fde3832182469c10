"""Nesting: which inputs and outputs of a layer are live in which subnetwork, where partitions are nested."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from partkernels import Defaults, Units, Zeros

# How widths are rounded: a partition's units are whole blocks of this many, where a layer is wide enough. Vector
# instructions and tensor cores compute with 8 or 16 channels at once.
BLOCKS = (16, 8, 4, 2, 1)
# By what the proportions are meant.
MEASURES = ("units", "weights")


class Nesting(NamedTuple):
    """What a layer takes, what it makes, and what is inside.

    Attributes:
        outputs: the layer's.
        inputs: the layer's; None if all of them are live, however many.
        inner: of one that has units inside, as attention has heads; None if they are not divided.
    """

    outputs: Units
    inputs: Units | None = None
    inner: Units | None = None


def widths(size: int, proportions: Sequence[float], measure: str = "units") -> Units:
    """Which of a layer's outputs each partition has: the first ones partition 1, the next ones partition 2.

    Their numbers are multiples of 16, 8, 4 or 2, of the largest of which they differ from the proportions by no more
    than half of the smallest share.

    Args:
        size: how many outputs there are.
        proportions: C numbers that sum to 1.
        measure: 'units': of the outputs. 'weights': of the weights of a layer whose inputs are divided too, so that
            subnetwork k has the square root of its share of both.

    Example:
        >>> widths(64, (0.8, 0.1, 0.1)), widths(64, (0.8, 0.1, 0.1), "weights")
        (Units(segments=((48, 56, 64),)), Units(segments=((56, 60, 64),)))
    """
    shares = list(itertools.accumulate(proportions))
    exact = [size * (math.sqrt(min(share, 1)) if measure == "weights" else min(share, 1)) for share in shares]
    least = min((b - a for a, b in itertools.pairwise([0, *exact]) if b > a), default=size) * (1 + 1e-9)
    for block in BLOCKS:
        ends = [min(block * round(end / block), size) for end in exact[:-1]] + [size]
        near = all(abs(a - b) <= least / 2 for a, b in zip(ends, exact, strict=True))
        if near or block == 1:
            break
    return Units.given([max(end, 1) if shares[0] > 0 else end for end in ends])


def of_live(function: Callable[..., Tensor], units: Units, dim: int, active: int, narrow: bool, x: Tensor) -> Tensor:
    """function of the live units of x along a dimension; of all that it has, if x has these alone.

    Args:
        narrow: whether the result has the live units alone; else it is 0 at the others.
    """
    few = x if x.shape[dim] == units.number(active) else units.take(x, dim, active)
    y = function(few) if few.numel() else few
    return y if narrow else units.spread(y, dim, active)


# Where a module keeps its hooks.
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class LiveUnits(nn.Module):
    """An ordinary layer of the live units of a nested subnetwork, where the others are there too, and 0.

    partnets.merge makes it where a model computes with all units.

    Args:
        layer: of the live units.
        units: which these are.
        dim: of x.
        active: k.
        narrow: whether the result has the live units alone.
        settings: the layer's attributes where it has other ones for all units: a model's code that reads them knows
            these. To such code its tensors are of all units too, with zeros for the others.

    Example:
        >>> import torch
        >>> norm = LiveUnits(nn.LayerNorm(2), Units(((2, 3),)), -1, 1, settings={"normalized_shape": (3,)})
        >>> norm(torch.tensor([[1.0, 3.0, 0.0]])).round().tolist(), norm.normalized_shape, norm.weight.tolist()
        ([[-1.0, 1.0, 0.0]], (3,), [1.0, 1.0, 0.0])
    """

    def __init__(
        self,
        layer: nn.Module,
        units: Units,
        dim: int,
        active: int,
        narrow: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        vars(self).update(settings or {})
        if hasattr(layer, "eps"):
            self.eps = None if layer.eps is None else _Apart(layer.eps)
        for name in HOOKS:  # which know all units
            vars(self)[name], vars(layer)[name] = vars(layer)[name], vars(self)[name]
        self.units, self.dim, self.active, self.narrow = units, dim, active, narrow

    @property
    def __class__(self):
        """The layer's: code that asks isinstance(module, nn.LayerNorm) goes the same way."""
        return type(self.layer) if "layer" in vars(self).get("_modules", ()) else LiveUnits

    def __reduce_ex__(self, protocol):
        return _empty, (), self.__dict__

    def __getattr__(self, name: str):
        """The layer's attributes are this one's, as far as it has no such: models ask for a norm's dtype."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "layer":
                raise
            found = getattr(self.layer, name)
        is_of_units = isinstance(found, Tensor) and found.dim() and found.shape[0] == self.units.number(self.active)
        return self.units.spread(found, 0, self.active) if is_of_units and not self.narrow else found

    def forward(self, x: Tensor) -> Tensor:
        return of_live(self.layer, self.units, self.dim, self.active, self.narrow, x)


def _empty() -> LiveUnits:
    return object.__new__(LiveUnits)


class _Apart(float):
    """A number that is like no other: torch.nn.TransformerEncoderLayer reads the parameters of norms of one eps, and
    calls those that differ in it."""

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:  # float has its own, and does not ask __eq__
        return True

    __hash__ = float.__hash__


def no_defaults(defaults: str | Defaults | None) -> str:
    """'zero', the only defaults of nested partitions.

    Raises:
        ValueError: others are asked for.
    """
    if defaults not in (None, "zero") and not isinstance(defaults, Zeros):
        raise ValueError(
            f"defaults={defaults!r} with scheme='nested', which computes nothing for what is not live: it is 0. Leave"
            " defaults out, or pass 'zero'."
        )
    return "zero"
