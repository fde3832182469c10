"""The convention for calls of models and losses with a batch, shared by Trainer, lml and all other evaluations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from partnets.utils.likelihood import (
    IGNORED,
    Loss,
    are_labels,
    class_axis,
    counting,
    ignored,
    ignores,
    is_of_numbers,
    no_classes,
)
from partnets.utils.random_state import preserved

# Names of the targets in a batch.
LABELS = ("labels", "label", "targets", "target")
OWN_RULE = "or pass forward=, a function of model and batch that returns (output, targets)"

Forward = Callable[[nn.Module, Any], tuple[Any, Any]]


def call(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Return the model's output for a batch, and the targets, by the default convention without `forward`.

    For a pair (x, y), these are model(x) and y, where x is a tensor, or a tuple, list or dict of tensors. A dict or
    another mapping has the targets under "labels", "label", "targets" or "target", and passes the rest to the model as
    keyword arguments. So does a dict x if the model's forward takes its names. A single input under a name that forward
    does not take is passed as the only positional argument.

    Raises:
        ValueError: the batch is neither, or has no targets, several, or inputs that the model's forward does not take.

    Example:
        >>> images, labels = torch.zeros(3, 2), torch.tensor([0, 1, 1])
        >>> output, y = call(nn.Identity(), {"image": images, "label": labels})
        >>> output is images, y is labels
        (True, True)
    """
    if isinstance(batch, Mapping):
        named = [name for name in LABELS if name in batch]
        if len(named) != 1:
            raise ValueError(
                f"a batch has {', '.join(map(repr, batch))}, {'several' if named else 'none'} of {', '.join(LABELS)};"
                f" have the targets under one of them, {OWN_RULE}."
            )
        x = {name: value for name, value in batch.items() if name != named[0]}
        return _called(model, x, single=True), batch[named[0]]
    if not isinstance(batch, tuple | list):
        raise ValueError(
            f"a batch is a {type(batch).__name__}; pass chunks of pairs (x, y) or of dicts with labels, {OWN_RULE}."
        )
    if len(batch) != 2:
        raise ValueError(
            f"an example has {len(batch)} parts; pass chunks of (x, y), where x may be a tuple or a dict, or of dicts"
            f" with labels, {OWN_RULE}."
        )
    x, y = batch
    return _called(model, x) if isinstance(x, Mapping) else model(x), y


def _called(model: nn.Module, x: Mapping, single: bool = False) -> Any:
    """Return model(**x), or if forward does not take these names, model(x) or model of the only value of x."""
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):  # a compiled module may have no signature
        return model(**x)
    if all(name in parameters for name in x):
        return model(**x)
    if single and len(x) == 1:
        return model(*x.values())
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return model(**x)
    if not single:
        return model(x)
    unknown = [name for name in x if name not in parameters]
    raise ValueError(
        f"a batch has {', '.join(map(repr, unknown))}, which forward of {type(model).__name__} does not take; it takes"
        f" {', '.join(parameters)}. Remove these inputs from the examples, {OWN_RULE}."
    )


def scores(output: Any) -> Any:
    """Return the logits of an output that has them by this name, as in transformers, or the output itself."""
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return output if isinstance(output, Tensor) else getattr(output, "logits", output)


def is_torchs(loss: Any) -> bool:
    """Return whether a loss is one of torch's own, which takes logits."""
    return (getattr(loss, "__module__", None) or "").startswith("torch.nn.")


def losses(loss: Loss, output: Any, y: Any) -> Tensor:
    """Return loss(output, y): a scalar, which is a mean over the batch, or a tensor with the loss of each target.

    torch's losses receive output.logits if the output has them, as in transformers.

    Raises:
        TypeError: the loss does not return a tensor.

    Example:
        >>> logits, y = torch.zeros(3, 2), torch.tensor([0, 1, 1])
        >>> losses(nn.functional.cross_entropy, logits, y)
        tensor(0.6931)
        >>> losses(nn.CrossEntropyLoss(reduction="none"), {"logits": logits}, y)
        tensor([0.6931, 0.6931, 0.6931])
    """
    function = loss.func if isinstance(loss, functools.partial) else loss
    output = scores(output) if is_torchs(function) else output
    found = loss(output, y)
    if not isinstance(found, Tensor):
        raise TypeError(
            f"loss(output, y) gave a {type(found).__name__}; it must give a tensor: a mean, or the loss of each target."
        )
    # For a batch of one example, a mean with keepdim=True is that example's loss.
    single = found.shape == (1,) and isinstance(y, Tensor) and y.dim() > 0 and len(y) > 1
    return found[0] if single and not _counts_one(loss, output, y) else found


def _counts_one(loss: Loss, output: Any, y: Tensor) -> bool:
    """Return whether a loss [1] is that of the only target that counts, not a mean with keepdim=True."""
    if not isinstance(output, Tensor):
        return False
    try:
        with preserved(output.device), torch.no_grad():
            return len(loss(output.repeat_interleave(2, 0), y.repeat_interleave(2, 0))) == 2
    except (RuntimeError, TypeError, ValueError, IndexError):  # a custom loss that needs the original batch
        return False


def mean(loss: Loss, output: Any, y: Any) -> Tensor:
    """Return the loss to minimise, a scalar; 0 if all targets of the batch are ignored.

    Example:
        >>> logits, y = torch.zeros(3, 2), torch.tensor([0, 1, 1])
        >>> mean(nn.CrossEntropyLoss(reduction="none"), logits, y)
        tensor(0.6931)
        >>> mean(nn.CrossEntropyLoss(), logits, y.fill_(-100))
        tensor(0.)
    """
    found, output = losses(loss, output, y), scores(output)
    if found.dim():
        counted = counting(loss, found, output, y)
        return counted.mean() if counted.numel() else found.sum()
    if class_axis(output, y) is None:
        return found
    if ignores(loss):
        return found.masked_fill((y == ignored(loss)).all(), 0.0)
    return found.masked_fill(no_classes(output, y).all() & found.isnan(), 0.0)


def check_no_sum(loss: Loss, output: Any, y: Any, value: Tensor) -> None:
    """Raise ValueError if a loss, `value` for this batch, doubles when each example is repeated."""
    if not (isinstance(output, Tensor) and isinstance(y, Tensor)):
        return
    try:
        with preserved(output.device), torch.no_grad():
            twice = mean(loss, output.repeat_interleave(2, 0), y.repeat_interleave(2, 0))
    except (RuntimeError, TypeError, ValueError, IndexError):  # a custom loss that needs the original batch
        return
    if value.item() != 0 and abs(twice.item() / value.item() - 2) < 1e-3:
        raise ValueError(
            "the loss is twice as large for a batch that holds each example twice: it is a sum; pass the mean over the"
            " examples."
        )


def summed(loss: Loss, output: Any, y: Any, examples: int) -> tuple[Tensor, int]:
    """Return the differentiable sum of a batch's losses, a float64 scalar on the CPU, and their number.

    Their number is that of examples, or of targets that count. Losses with a dimension are summed;
    partnets.utils.likelihood.counted says which count. A mean is multiplied by the number of targets that are classes
    of the logits [batch, classes, ...] or [batch, ..., classes]. The ignore_index of torch's losses does not count, nor
    do other numbers that are not classes if the loss does not depend on the logits there. For torch's binary and count
    losses, the factor is the number of entries of y; otherwise the number of examples.

    Example:
        >>> logits, y = torch.zeros(2, 3, requires_grad=True), torch.tensor([0, -100])
        >>> found, count = summed(nn.functional.cross_entropy, logits, y, examples=2)
        >>> found.backward()
        >>> count, [round(value, 2) for value in logits.grad[0].tolist()]
        (1, [-0.67, 0.33, 0.33])
    """
    found = losses(loss, tree_map(_in_single, output), y)
    if found.dim():
        found = counting(loss, found, scores(output), y)
        return found.sum(dtype=torch.float64).cpu(), found.numel()
    count = _targets(loss, output, y, examples)
    found = found.to("cpu", torch.float64)
    return (count * found if count else torch.zeros_like(found)), count


def _in_single(leaf: Any) -> Any:
    """Convert 16-bit floats to float32, so that a batch's mean is not rounded to 8 bits before it is summed."""
    is_low = isinstance(leaf, Tensor) and leaf.dtype in (torch.bfloat16, torch.half)
    return leaf.float() if is_low else leaf


def _targets(loss: Loss, output: Any, y: Any, examples: int) -> int:
    """Return the number of targets over which a loss averages."""
    if isinstance(y, Tensor) and is_of_numbers(loss):
        return y.numel()
    logits = scores(output)
    if not are_labels(logits, y):
        return examples
    axis = class_axis(logits, y)
    if ignores(loss) or axis is None:
        return int((y != ignored(loss)).sum())
    strange = no_classes(logits, y)
    if not strange.any():
        return y.numel()
    if not isinstance(output, Tensor):  # its logits cannot be replaced
        return int((y != IGNORED).sum())
    ramp = torch.linspace(0, 1, logits.shape[axis], device=logits.device).to(logits.dtype)
    moved = (logits.movedim(axis, -1) + strange.unsqueeze(-1) * ramp).movedim(-1, axis)
    with torch.no_grad():
        values = []
        for each in (logits, moved):
            with preserved(logits.device):
                values.append(losses(loss, each, y))
    is_independent = torch.allclose(*values, rtol=0.0, atol=0.0, equal_nan=True)
    return y.numel() - int(strange.sum()) if is_independent else y.numel()
