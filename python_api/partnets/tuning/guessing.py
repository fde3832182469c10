"""Guessing: the loss of the best prediction that is the same for all examples, which a network must undercut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from partnets.utils.likelihood import BINARY, CROSS_ENTROPIES, NLL_LOSSES, SQUARED, ignored, name_of
from partnets.utils.targets import token_cross_entropy


def guessed_nats(loss: Any, targets: Sequence[Any]) -> float | None:
    """Return the loss of the best constant prediction in nats; of a squared error n / 2 log(error) for n numbers.

    Args:
        loss: of torch: a cross-entropy or NLLLoss, one of several labels, or a squared error.
        targets: the targets of each batch.

    Returns:
        None for another loss, or for targets that differ in shape.

    Example:
        >>> y = torch.tensor([0, 1, 1, 0])
        >>> round(guessed_nats(torch.nn.functional.cross_entropy, [y]) / math.log(2), 6)
        4.0
    """
    name = name_of(loss)
    if not targets or not all(isinstance(y, Tensor) and y.shape[1:] == targets[0].shape[1:] for y in targets):
        return None
    y = torch.cat([each.cpu() for each in targets])
    if (name in CROSS_ENTROPIES | NLL_LOSSES or loss is token_cross_entropy) and not y.is_floating_point():
        counts = y[y != ignored(loss)].flatten().bincount().double()
        return _entropy(counts, counts.sum())
    y = y.double().flatten(1) if y.dim() > 1 else y.double()[:, None]
    if name in BINARY:
        ones = y.sum(0)
        return _entropy(torch.stack([ones, len(y) - ones]), len(y))
    if name in SQUARED:
        error = (y - y.mean(0)).square().mean()
        return y.numel() / 2 * math.log(max(float(error), 1e-30))
    return None


def _entropy(counts: Tensor, total: Tensor | int) -> float:
    return -float(torch.special.xlogy(counts, counts / total).sum())
