"""EmbeddingDropout: dropout of whole words of a vocabulary, with a learned rate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partnets.hyper.dropout import RATES, check_rates, mask
from partnets.hyper.hyperparameter import Hyperparameter
from partnets.hyper.learned import Learned
from partnets.hyper.ranges import Range


class EmbeddingDropout(Hyperparameter):
    """Dropout of words: in training, all occurrences of a word in a batch are 0 with probability p.

    See Gal and Ghahramani (2016). A batch has one rate and one draw, since a table's row is dropped for all examples.
    The other words are divided by 1 - p. The rate gets no gradient through the mask: see hyper.Dropout.

    Args:
        rate: the initial p.
        range: range of the rate, inside [0, 1].

    Attributes:
        rate: hyper.Learned, a single value.

    Shapes:
        embedded [..., features], the table's rows for the words [...]; returns the same shape.

    Raises:
        ValueError: rate is outside the range, the range exceeds [0, 1], or the shapes differ.

    Example:
        >>> import torch
        >>> words, table = torch.tensor([[1, 2, 1]]), nn.Embedding(4, 8)
        >>> EmbeddingDropout(0.1)(table(words), words).shape
        torch.Size([1, 3, 8])
    """

    only_in_training = True

    def __init__(self, rate: float = 0.1, *, range: Range = RATES) -> None:
        super().__init__()
        check_rates(range)
        range.check("rate", rate)
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

    def to_ordinary(self) -> nn.Module:
        """Return a module that passes the first of its two arguments through."""
        return First()


class First(nn.Module):
    """A module that passes the first of its two arguments through."""

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return x
