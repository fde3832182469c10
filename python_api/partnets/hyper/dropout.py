"""Dropout: torch's dropout with a rate that self-tuning networks can tune for each example."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partnets.hyper.hyperparameter import Hyperparameter
from partnets.hyper.learned import Learned, check_real
from partnets.hyper.ranges import Range, interval

# As in MacKay et al. (2019).
RATES = interval(0.0, 0.9)


def check_rates(range: Range) -> None:
    """Raise ValueError unless the range is inside [0, 1]."""
    if not (range.low >= 0 and range.high <= 1):
        raise ValueError(f"the range is ({range.low:g}, {range.high:g}); pass one inside [0, 1].")


def mask(rate: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a mask that is 0 with probability rate and 1 / (1 - rate) otherwise; the rate gets no gradient."""
    rate = rate.detach()
    kept = torch.rand(shape, dtype=rate.dtype, device=rate.device) >= rate
    return (kept / (1 - rate).clamp(min=torch.finfo(rate.dtype).tiny)).to(dtype)


class Dropout(Hyperparameter):
    """Dropout: in training, entries of x are 0 with probability p, and the others are divided by 1 - p.

    The rate gets no gradient through the mask, so partnets.stn learns it through the best response. For
    partnets.Trainer use hyper.ConcreteDropout, which has a differentiable mask.

    Args:
        rate: the initial p.
        same_along: dimensions of x along which the mask is the same: (1,) of x [batch, length, features] for locked or
            variational dropout (Gal and Ghahramani 2016), (2, 3) of images for whole channels.
        range: range of the rate, inside [0, 1].

    Attributes:
        rate: hyper.Learned, a single value.

    Shapes:
        x of any shape, floating point; returns the same shape.

    Raises:
        ValueError: rate is outside the range, the range exceeds [0, 1], or x lacks a dimension in same_along.

    Example:
        >>> dropout = Dropout(0.25)
        >>> x = torch.ones(2, 3)
        >>> dropout(x).shape, dropout.values()
        (torch.Size([2, 3]), {'rate': 0.25})
        >>> torch.equal(dropout.eval()(x), x)
        True
    """

    per_example = True
    only_in_training = True

    def __init__(self, rate: float = 0.1, *, same_along: tuple[int, ...] = (), range: Range = RATES) -> None:
        super().__init__()
        check_rates(range)
        range.check("rate", rate)
        self.same_along = (same_along,) if isinstance(same_along, int) else tuple(same_along)
        self.rate = Learned(rate, range)

    def forward(self, x: Tensor) -> Tensor:
        check_real(self, x)
        if not self.training:
            return x
        if not all(-x.dim() <= dim < x.dim() for dim in self.same_along):
            raise ValueError(f"x is {list(x.shape)}, without all of the dimensions same_along={self.same_along}.")
        shape = list(x.shape)
        for dim in self.same_along:
            shape[dim] = 1
        return x * mask(self.rate(x), shape, x.dtype)

    def to_ordinary(self) -> nn.Module:
        """Return torch's dropout at the current rate, of entries or of whole channels; nn.Identity for other masks.

        Example:
            >>> Dropout(0.25).to_ordinary()
            Dropout(p=0.25, inplace=False)
        """
        # Not nn.Dropout1d, which raises for inputs of more dimensions, in evaluation mode too.
        kinds = {(): nn.Dropout, (2, 3): nn.Dropout2d, (2, 3, 4): nn.Dropout3d}
        kind = kinds.get(tuple(sorted(self.same_along)))
        return nn.Identity() if kind is None else kind(self.values()["rate"])

    def extra_repr(self) -> str:
        return f"same_along={self.same_along}" if self.same_along else ""
