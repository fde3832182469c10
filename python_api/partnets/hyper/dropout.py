"""Dropout, EmbeddingDropout and DropConnect: dropout with rates that self-tuning networks can tune."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partnets.hyper.hyperparameter import Hyperparameter
from partnets.hyper.learned import Learned, check_real
from partnets.hyper.ranges import Range, interval
from partnets.hyper.tracing import traced

# As in MacKay et al. (2019).
RATES = interval(0.0, 0.9)


def check_rate(name: str, rate: float, range: Range) -> None:
    """Raise ValueError unless the range is inside [0, 1] and the rate inside the range."""
    if not (range.low >= 0 and range.high <= 1):
        raise ValueError(f"the range is ({range.low:g}, {range.high:g}); pass one inside [0, 1].")
    range.check(name, rate)


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
        check_rate("rate", rate, range)
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

    def to_torch(self) -> nn.Module:
        """Return torch's dropout at the current rate, of entries or of whole channels; nn.Identity for other masks.

        Example:
            >>> Dropout(0.25).to_torch()
            Dropout(p=0.25, inplace=False)
        """
        # Not nn.Dropout1d, which raises for inputs of more dimensions, in evaluation mode too.
        kinds = {(): nn.Dropout, (2, 3): nn.Dropout2d, (2, 3, 4): nn.Dropout3d}
        kind = kinds.get(tuple(sorted(self.same_along)))
        return nn.Identity() if kind is None else kind(self.values()["rate"])

    def extra_repr(self) -> str:
        return f"same_along={self.same_along}" if self.same_along else ""


class EmbeddingDropout(Hyperparameter):
    """Dropout of words: in training, all occurrences of a word in a batch are 0 with probability p.

    See Gal and Ghahramani (2016). A batch has one rate and one draw, since a table's row is dropped for all examples.
    The other words are divided by 1 - p. The rate gets no gradient through the mask: see hyper.Dropout.

    Args:
        rate: the initial p.
        range: range of the rate, inside [0, 1].

    Shapes:
        embedded [..., features], the table's rows for the words [...]; returns the same shape.

    Raises:
        ValueError: rate is outside the range, the range exceeds [0, 1], or the shapes differ.

    Example:
        >>> words, table = torch.tensor([[1, 2, 1]]), nn.Embedding(4, 8)
        >>> EmbeddingDropout(0.1)(table(words), words).shape
        torch.Size([1, 3, 8])
    """

    only_in_training = True

    def __init__(self, rate: float = 0.1, *, range: Range = RATES) -> None:
        super().__init__()
        check_rate("rate", rate, range)
        self.rate = Learned(rate, range)

    def forward(self, embedded: Tensor, words: Tensor) -> Tensor:
        if embedded.shape[:-1] != words.shape:
            raise ValueError(
                f"embedded is {list(embedded.shape)} and words {list(words.shape)}; pass [..., features] and [...]."
            )
        if not self.training or not words.numel():
            return embedded
        # One draw per position; a word takes the draw of its first position. A draw per distinct word would make the
        # number of draws depend on the data.
        distinct, number = words.flatten().unique(return_inverse=True)
        places = torch.arange(words.numel(), device=words.device)
        first = places.new_full(distinct.shape, words.numel()).scatter_reduce(0, number, places, "amin")
        kept = mask(self.rate(), [words.numel()], embedded.dtype)
        return embedded * kept[first[number]].view(words.shape).unsqueeze(-1)

    def to_torch(self) -> nn.Module:
        """Return a module that passes the first of its two arguments through."""
        return traced(_First())


class _First(nn.Module):
    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return x


class DropConnect(Hyperparameter):
    """Dropout of a weight's entries: in training they are 0 with probability p, one draw per batch (Wan et al. 2013).

    Set it as the attribute `drop_connect` of a layer before stn.convert. It drops the hidden-state weights of recurrent
    layers (Merity et al. 2017), and the weight of linear layers, with the same mask for W_hyper. A torch.nn layer
    ignores the attribute. The rate gets no gradient through the mask: see hyper.Dropout.

    Args:
        rate: the initial p.
        range: range of the rate, inside [0, 1].

    Shapes:
        A weight; returns a mask of the same shape, with entries 0 or 1 / (1 - p).

    Raises:
        ValueError: rate is outside the range, or the range exceeds [0, 1].

    Example:
        >>> from partnets import stn
        >>> lstm = nn.LSTM(4, 8)
        >>> lstm.drop_connect = DropConnect(0.5)
        >>> stn.convert(lstm, lstm.drop_connect)(torch.ones(5, 2, 4))[0].shape
        torch.Size([5, 2, 8])
    """

    only_in_training = True

    def __init__(self, rate: float = 0.5, *, range: Range = RATES) -> None:
        super().__init__()
        check_rate("rate", rate, range)
        self.rate = Learned(rate, range)

    def forward(self, weight: Tensor) -> Tensor:
        if not self.training:
            return torch.ones_like(weight)
        return mask(self.rate(), weight.shape, weight.dtype)

    def to_torch(self) -> nn.Module:
        """Return nn.Identity()."""
        return nn.Identity()
