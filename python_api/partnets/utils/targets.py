"""Checks of targets and outputs that a loss of torch would accept silently, or refuse without a cure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partnets.utils.likelihood import SQUARED, ignored, is_cross_entropy, name_of

# How far the sum of probabilities may be from 1.
ROUNDING = 1e-4


def token_cross_entropy(logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy of tokens, of logits [batch, length, classes] and labels [batch, length].

    Example:
        >>> token_cross_entropy(torch.zeros(2, 5, 3), torch.ones(2, 5, dtype=torch.int64))
        tensor(1.0986)
    """
    return F.cross_entropy(
        getattr(logits, "logits", logits).flatten(0, -2), labels.flatten(), label_smoothing=label_smoothing
    )


def tried(model: nn.Module, batch: Any, forward: Callable[[nn.Module, Any], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return the output of a model and the targets of a batch.

    Raises:
        ValueError: the model does not take the batch; with what images and labels look like.

    Example:
        >>> tried(nn.Conv2d(1, 2, 3), (torch.rand(4, 8, 8), torch.zeros(4)), lambda model, batch: (model(batch[0]), batch[1]))
        Traceback (most recent call last):
        ValueError: the model does not take a batch of these data: ... channels: x.unsqueeze(1) for grey ones.
    """  # noqa: E501, an example is one line
    try:
        return forward(model, batch)
    except (RuntimeError, TypeError) as error:
        hint = _hint(batch)
        if not hint:
            raise
        raise ValueError(f"the model does not take a batch of these data: {error}.{hint}") from error


def _hint(batch: Any) -> str:
    x = batch[0] if isinstance(batch, tuple | list) and batch else None
    if not isinstance(x, Tensor):
        return ""
    hint = ""
    if x.dim() == 3:
        hint += " Images need a dimension for their channels: x.unsqueeze(1) for grey ones."
    if x.dtype == torch.uint8:
        hint += " Of images pass x.float() / 255, or put data.ToFloat before the network."
    return hint and f" x is {list(x.shape)} of {x.dtype}.{hint}"


def check_targets(loss: Any, output: Any, y: Any) -> None:
    """Raise ValueError if targets do not fit the outputs of a network under one of torch's losses.

    Args:
        loss: any; losses that are not torch's cross-entropy or squared error are not checked.
        output: of the network, or of transformers' models an object with `logits`.
        y: the targets.

    Raises:
        ValueError: labels are no whole numbers, have a dimension of 1 or are out of range; the outputs are
            probabilities where logits are expected; or a squared error would broadcast.

    Example:
        >>> from torch.nn.functional import cross_entropy
        >>> check_targets(cross_entropy, torch.zeros(2, 3), torch.tensor([[0], [2]]))
        Traceback (most recent call last):
        ValueError: the labels are [2, 1], of logits [2, 3]; pass labels.squeeze(1).
    """
    output = getattr(output, "logits", output)
    if not isinstance(output, Tensor) or not isinstance(y, Tensor):
        return
    if name_of(loss) in SQUARED and output.shape != y.shape:
        cure = "targets.unsqueeze(1)" if output.shape == (*y.shape, 1) else "both in one shape"
        raise ValueError(
            f"the targets are {list(y.shape)} and the outputs {list(output.shape)}, which a squared error broadcasts;"
            f" pass {cure}."
        )
    if loss is token_cross_entropy or is_cross_entropy(loss):
        _check_labels(loss, output, y)


def _check_labels(loss: Any, output: Tensor, y: Tensor) -> None:
    shapes = f"{list(y.shape)}, of logits {list(output.shape)}"
    classes = output.shape[-1 if loss is token_cross_entropy else 1]
    if y.is_floating_point() and y.shape == output.shape:  # a probability for each class
        return
    if y.is_floating_point() or y.dtype == torch.bool:
        raise ValueError(f"the labels are {y.dtype}, {shapes}; pass labels.long() of classes 0..{classes - 1}.")
    if y.dim() == output.dim() and y.shape[1:2] == (1,):
        raise ValueError(f"the labels are {shapes}; pass labels.squeeze(1).")
    counted = y[y != ignored(loss)]
    if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < classes:
        raise ValueError(
            f"the labels are {int(counted.min())} to {int(counted.max())}, and the network has {classes} outputs; pass"
            f" labels from 0 to {classes - 1}."
        )
    rows = output.detach().float().movedim(-1 if loss is token_cross_entropy else 1, 1)
    sums = rows.sum(1)
    if classes > 1 and bool((rows >= 0).all()) and bool(((sums - 1).abs() < ROUNDING).all()):
        raise ValueError(
            "the outputs are probabilities: each row is positive and its sum is 1. A cross-entropy takes logits; leave"
            " out the softmax at the end of the network."
        )
