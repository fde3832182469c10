"""expected_error: how often a classifier that draws from its own probabilities would be wrong."""

from __future__ import annotations

from torch import Tensor

from partnets.utils.likelihood import IGNORED


def expected_error(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean of 1 - p(y | x), as a `hyper_loss` where labels of unseen data may be wrong as well.

    Labels that are replaced at random, by any class alike, change it by a factor and a constant, and so neither where
    it is least nor the direction of its gradient (Ghosh, Kumar and Sastry 2017). A likelihood they do change: it is
    highest where the network is as unsure as the labels are wrong.

    Args:
        logits: [batch, classes].
        labels: int64 [batch]; those that are -100 do not count.

    Returns:
        A scalar in [0, 1].

    Example:
        >>> import torch
        >>> expected_error(torch.zeros(3, 4), torch.tensor([0, 1, 2]))
        tensor(0.7500)
    """
    counts = labels != IGNORED
    return 1 - logits[counts].softmax(1).gather(1, labels[counts][:, None]).mean()
