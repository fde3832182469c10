"""Checks of targets and outputs that torch's losses accept silently or refuse without naming a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from partnets.utils.losses import BINARY, CROSS_ENTROPIES, DISTANCES, ignored, name_of, scores

# The largest difference of a sum of probabilities from 1.
ROUNDING = 1e-4


def is_binary(y: Tensor) -> bool:
    """Return whether a tensor has zeros and ones only."""
    return bool(((y == 0) | (y == 1)).all())


def are_probabilities(rows: Tensor, axis: int = 1) -> bool:
    """Return whether no entry is negative and sums over an axis are 1."""
    return bool((rows >= 0).all() and ((rows.sum(axis) - 1).abs() < ROUNDING).all())


def check_targets(loss: Any, output: Any, y: Any) -> None:
    """Raise ValueError if targets do not fit a network's outputs under one of torch's losses.

    Args:
        loss: any loss; only torch's cross-entropies, also binary ones, and distances are checked.
        output: the network's output, or an object with `logits` as from transformers' models.
        y: the targets.

    Raises:
        ValueError: labels have a wrong dtype or shape or are out of range; the outputs are probabilities where logits
            are expected, or a single logit; or a distance would broadcast.
    """
    output = scores(output)
    if not isinstance(output, Tensor) or not isinstance(y, Tensor):
        return
    name = name_of(loss)
    if name in DISTANCES and output.shape != y.shape:
        raise ValueError(
            f"the targets are {list(y.shape)} and the outputs {list(output.shape)}, which {name} broadcasts;"
            f" pass {_one_shape(output, y)}."
        )
    if name in BINARY and not (y.is_floating_point() and y.shape == output.shape):
        raise ValueError(f"the labels are {y.dtype}, {_shapes(output, y)}; pass {_floats(output, y)}.")
    if name in CROSS_ENTROPIES:
        _check_labels(loss, output, y)


def check_broadcast(loss: Callable[..., Any], output: Any, y: Any) -> None:
    """Raise ValueError if a user-defined loss broadcasts outputs and targets, such as [n, 1] with [n]."""
    tensors = isinstance(output, Tensor) and isinstance(y, Tensor) and not name_of(loss)
    if not tensors or output.shape == y.shape or output.squeeze().shape != y.squeeze().shape or len(y) < 2:
        return
    try:
        values = [loss(each, y) for each in (output, output.reshape(y.shape))]
        broadcast = values[0].shape == values[1].shape and not torch.allclose(*values, 1e-4, 1e-7, equal_nan=True)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):  # the loss requires other shapes
        return
    if broadcast:
        raise ValueError(
            f"the loss with outputs {list(output.shape)} differs from that with the targets' shape {list(y.shape)}: it"
            f" broadcasts them; pass {_one_shape(output, y)}."
        )


def _one_shape(output: Tensor, y: Tensor) -> str:
    """Return the text that says how to give targets the outputs' shape."""
    return "targets.unsqueeze(1)" if output.shape == (*y.shape, 1) else "both in one shape"


def _shapes(output: Tensor, y: Tensor) -> str:
    return f"{list(y.shape)}, of logits {list(output.shape)}"


def _floats(output: Tensor, y: Tensor) -> str:
    """Return the expression that converts labels to floats of the outputs' shape."""
    shape = ", ".join(map(str, (-1, *output.shape[1:])))
    return "labels.float()" + ("" if y.shape == output.shape else f".reshape({shape})")


def _axis(loss: Any) -> int:
    """Return the dimension of the classes in a cross-entropy's logits."""
    return -1 if name_of(loss) == "token_cross_entropy" else 1


def _check_labels(loss: Any, output: Tensor, y: Tensor) -> None:
    shapes = _shapes(output, y)
    axis = _axis(loss)
    classes = output.shape[axis] if output.dim() > 1 else 1
    if classes == 1 or (y.shape == output.shape and not y.is_floating_point()):
        fitting = "binary_cross_entropy_with_logits" if is_binary(y) else "mse_loss"
        single = classes == 1
        raise ValueError(
            f"the labels are {y.dtype}, {shapes}{', a single output, whose cross-entropy is always 0' * single}; pass"
            f" {_floats(output, y)} with loss=F.{fitting}{', or give the network an output for each class' * single}."
        )
    if y.is_floating_point() and y.shape == output.shape:  # a probability for each class
        return
    if y.is_floating_point() or y.dtype == torch.bool:
        raise ValueError(f"the labels are {y.dtype}, {shapes}; pass labels.long() of classes 0..{classes - 1}.")
    if y.dtype not in (torch.int64, torch.uint8):
        raise ValueError(f"the labels are {y.dtype}; pass labels.long().")
    if y.dim() == output.dim() and y.shape[1:2] == (1,):
        raise ValueError(f"the labels are {shapes}; pass labels.squeeze(1).")
    check_range(loss, output, y)
    if are_probabilities(output.detach().float(), axis):
        raise ValueError(
            "the outputs are probabilities: each row is positive and its sum is 1. A cross-entropy takes logits; leave"
            " out the softmax at the end of the network."
        )


def check_range(loss: Any, output: Any, y: Tensor) -> None:
    """Raise ValueError if class labels are out of range; `y` may belong to other examples than the outputs."""
    output = scores(output)
    if name_of(loss) not in CROSS_ENTROPIES or y.is_floating_point() or not isinstance(output, Tensor):
        return
    classes, counted = output.shape[_axis(loss)], y[y != ignored(loss)]
    if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < classes:
        raise ValueError(
            f"the labels are {int(counted.min())} to {int(counted.max())}, and the network has {classes} outputs; pass"
            f" labels from 0 to {classes - 1}."
        )
