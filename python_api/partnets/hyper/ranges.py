"""Ranges of hyperparameters, each with a map from an unconstrained parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.distributions.transforms import (
    AffineTransform,
    ComposeTransform,
    ExpTransform,
    SigmoidTransform,
    SoftplusTransform,
    Transform,
    identity_transform,
)


def precise() -> torch.dtype:
    """Return torch's default dtype, or float32 if that is lower."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


@dataclass(frozen=True)
class Range:
    """An open interval (low, high), with a map from the real line to it.

    A hyperparameter learns a real number, and the map turns it into a value inside the interval. partnets.hyper has
    `real`, `positive`, `probability`, `interval` and `logarithmic`; construct others as below.

    Attributes:
        low, high: the borders, excluded.
        transform: a torch.distributions transform from the unconstrained parameter to the value.

    Example:
        >>> above_one = Range(1.0, math.inf, ComposeTransform([SoftplusTransform(), AffineTransform(1.0, 1.0)]))
        >>> bool(above_one.transform(torch.tensor(-5.0)) > 1)
        True
    """

    low: float
    high: float
    transform: Transform

    def check(self, name: str, value: float, unit: float = 1.0) -> None:
        """Raise unless value * unit, rounded to the dtype of `precise`, lies inside.

        Raises:
            ValueError: the value is outside; names it and the borders in user units.

        Example:
            >>> probability.check("rate", 1.5)
            Traceback (most recent call last):
            ValueError: rate=1.5; pass a number between 0 and 1, both excluded.
        """
        low, number, high = torch.tensor([self.low, value * unit, self.high], dtype=precise(), device="cpu").tolist()
        if not low < number < high:
            low, high = self.low / unit, self.high / unit
            if math.isfinite(high):
                expected = f"a number between {low:g} and {high:g}, both excluded"
            else:
                expected = f"a finite number above {low:g}" if math.isfinite(low) else "a finite number"
            raise ValueError(f"{name}={value}; pass {expected}.")


def interval(low: float, high: float) -> Range:
    """Return the range (low, high), mapped by a scaled sigmoid.

    Raises:
        ValueError: the borders are not finite, or low is not below high.

    Example:
        >>> interval(-1.0, 3.0).transform(torch.tensor(0.0))
        tensor(1.)
    """
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"low={low} and high={high}; pass two finite numbers, the lower one first.")
    return Range(low, high, ComposeTransform([SigmoidTransform(), AffineTransform(low, high - low)]))


def logarithmic(low: float, high: float) -> Range:
    """Return the range (low, high), mapped by a scaled sigmoid of the logarithm: for strengths of unknown magnitude.

    Raises:
        ValueError: the borders are not finite, low is not below high, or low is not positive.

    Example:
        >>> logarithmic(1e-6, 1e-2).transform(torch.tensor(0.0))
        tensor(1.0000e-04)
    """
    if not 0 < low < high < math.inf:
        raise ValueError(f"low={low} and high={high}; pass two positive finite numbers, the lower one first.")
    over = AffineTransform(math.log(low), math.log(high / low))
    return Range(low, high, ComposeTransform([SigmoidTransform(), over, ExpTransform()]))


# Unconstrained.
real = Range(-math.inf, math.inf, identity_transform)
# Above 0, by the softplus, as in Benton et al. (2020).
positive = Range(0.0, math.inf, SoftplusTransform())
# (0, 1), by the sigmoid: the parameter is the logit.
probability = Range(0.0, 1.0, SigmoidTransform())
