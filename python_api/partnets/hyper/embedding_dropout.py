"""EmbeddingDropout: whole words of a vocabulary dropped, at a rate that is learned."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partnets.hyper.dropout import RATES, check_rates, mask
from partnets.hyper.hyperparameter import Hyperparameter
from partnets.hyper.learned import Learned
from partnets.hyper.ranges import Range


class EmbeddingDropout(Hyperparameter):
    """In training, all occurrences of a word in a batch are 0 with probability p (Gal and Ghahramani 2016).

    One rate and one draw for each batch, as the rows of a table are dropped for all. The other words are 1 / (1 - p) as
    large. The rate gets no gradient through the mask: see hyper.Dropout.

    Args:
        rate: the initial p.
        range: of the rate, inside [0, 1].

    Attributes:
        rate: hyper.Learned, a single value.

    Shapes:
        embedded [..., features], what a table has for the words [...], to the same.

    Raises:
        ValueError: rate is not inside the range, or the range reaches out of [0, 1]; or the shapes differ.

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
        # A draw for each place, of which a word takes that of its first: how many there are tells nothing of the data.
        distinct, number = words.flatten().unique(return_inverse=True)
        places = torch.arange(words.numel(), device=words.device)
        first = places.new_full(distinct.shape, words.numel()).scatter_reduce(0, number, places, "amin")
        kept = mask(self.rate(), [words.numel()], embedded.dtype)
        return embedded * kept[first[number]].view(words.shape).unsqueeze(-1)

    def to_ordinary(self) -> nn.Module:
        """What passes the first of both arguments through."""
        return First()


class First(nn.Module):
    """Passes the first of two arguments through."""

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return x
