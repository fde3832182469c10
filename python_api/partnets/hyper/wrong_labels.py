"""expected_error: the expected error rate of a classifier that samples its predictions."""

from __future__ import annotations

from torch import Tensor

from partnets.utils.likelihood import IGNORED


def expected_error(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of 1 - p(y | x), a `hyper_loss` for held-out data that may have wrong labels.

    If labels are replaced uniformly at random, this loss changes only by a factor and a constant, so its minimum and
    the direction of its gradient stay the same (Ghosh, Kumar and Sastry 2017). The likelihood, in contrast, is then
    highest for a network that is as uncertain as the labels are.

    Args:
        logits: [batch, classes].
        labels: int64 [batch]; -100 is ignored.

    Returns:
        A scalar in [0, 1].

    Example:
        >>> import torch
        >>> expected_error(torch.zeros(3, 4), torch.tensor([0, 1, 2]))
        tensor(0.7500)
    """
    counts = labels != IGNORED
    return 1 - logits[counts].softmax(1).gather(1, labels[counts][:, None]).mean()
