"""Guessing: the loss of the best constant prediction, which a network that has learned must undercut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from partnets.data.batch import summed
from partnets.utils.likelihood import BINARY, SQUARED, ignored, ignores, name_of, weighs
from partnets.utils.targets import token_cross_entropy


def guessed_nats(loss: Any, judged: Sequence[tuple[Any, Any]]) -> float | None:
    """Return the loss of the best constant prediction in nats; for a squared error n / 2 log(error) for n numbers.

    Args:
        loss: for torch's losses, the best constant is known. For others, it is the best weighted mean of the outputs,
            as a constant outside of their range may be impossible for the network.
        judged: outputs and targets of each batch.

    Returns:
        The loss, or None if outputs are not tensors of one shape, or targets differ in shape.

    Example:
        >>> y = torch.tensor([0, 1, 1, 0])
        >>> round(guessed_nats(torch.nn.functional.cross_entropy, [(torch.zeros(4, 2), y)]) / math.log(2), 6)
        4.0
    """
    name, targets = name_of(loss), [y for _, y in judged]
    of_classes = ignores(loss) or loss is token_cross_entropy
    soft = of_classes and any(isinstance(y, Tensor) and y.is_floating_point() for y in targets)
    if soft or weighs(loss) or not (of_classes or name in BINARY | SQUARED):
        return _of_means(loss, judged)
    if not targets or not all(isinstance(y, Tensor) and y.shape[1:] == targets[0].shape[1:] for y in targets):
        return None
    y = torch.cat([each.cpu() for each in targets])
    if of_classes:
        counts = y[y != ignored(loss)].flatten().bincount().double()
        return _entropy(counts, counts.sum())
    y = y.double().flatten(1) if y.dim() > 1 else y.double()[:, None]
    if name in BINARY:
        ones = y.sum(0)
        return _entropy(torch.stack([ones, len(y) - ones]), len(y))
    error = (y - y.mean(0)).square().mean()
    return y.numel() / 2 * math.log(max(float(error), 1e-30))


def _of_means(loss: Any, judged: Sequence[tuple[Any, Any]]) -> float | None:
    """Return the lowest total loss if all outputs are replaced by one weighted mean of them."""
    outputs = [output for output, _ in judged]
    if not outputs or not all(isinstance(each, Tensor) and each.dim() and each.is_floating_point() for each in outputs):
        return None
    if any(each.shape[1:] != outputs[0].shape[1:] for each in outputs):
        return None
    rows, found = torch.cat(outputs).detach(), []
    weights = torch.zeros(len(rows), device=rows.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=50, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        constant = torch.tensordot(weights.softmax(0).to(rows.dtype), rows, 1)
        total = sum(summed(loss, constant.expand_as(output), y, len(output))[0] for output, y in judged)
        found.append(float(total.detach()))
        if total.requires_grad:
            total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(closure)
    return min((value for value in found if math.isfinite(value)), default=None)


def _entropy(counts: Tensor, total: Tensor | int) -> float:
    return -float(torch.special.xlogy(counts, counts / total).sum())
