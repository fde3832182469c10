"""The one rule of what a batch is to a model and to a loss; Trainer, lml and all other evaluations go by it."""

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

# Under which of these a batch has its targets.
LABELS = ("labels", "label", "targets", "target")
OWN_RULE = "or pass forward=, a function of model and batch that returns (output, targets)"

Forward = Callable[[nn.Module, Any], tuple[Any, Any]]


def call(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """The model's output for a batch, and the targets: what `forward` does where none is given.

    A pair (x, y) is model(x) and y, whatever x is: a tensor, or a tuple, list or dict of tensors. A dict, or another
    mapping, has the targets under "labels", "label", "targets" or "target", and the rest goes to the model as keyword
    arguments. So does a dict x whose names the model's forward takes. A single input under a name that forward does not
    take goes as its only argument.

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
    """model(**x), or model of x itself, or of what alone is in it, if the model's forward doesn't take these names."""
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):  # a compiled one tells no names
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
        f" {', '.join(parameters)}. Leave out of the examples what the model does not need, {OWN_RULE}."
    )


def scores(output: Any) -> Any:
    """The logits of an output that has some under this name, as transformers' or a dict; any other as it is."""
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return output if isinstance(output, Tensor) else getattr(output, "logits", output)


def is_torchs(loss: Any) -> bool:
    """Return whether a loss is one of torch's own, which takes logits."""
    return (getattr(loss, "__module__", None) or "").startswith("torch.nn.")


def losses(loss: Loss, output: Any, y: Any) -> Tensor:
    """loss(output, y): a mean, or with a dimension the losses themselves. torch's own criteria are given the logits."""
    function = loss.func if isinstance(loss, functools.partial) else loss
    found = loss(scores(output) if is_torchs(function) else output, y)
    if not isinstance(found, Tensor):
        raise TypeError(
            f"loss(output, y) gave a {type(found).__name__}; it must give a tensor: a mean, or the loss of each target."
        )
    # A mean with keepdim=True; of a batch of one example it may be that example's loss.
    single = found.shape == (1,) and isinstance(y, Tensor) and y.dim() > 0 and len(y) > 1
    return found[0] if single else found


def mean(loss: Loss, output: Any, y: Any) -> Tensor:
    """The loss to be minimised, a scalar; 0 of a batch whose classes count nowhere.

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
    """Raises ValueError if a loss, `value` of this batch, is twice as large for one that holds each example twice."""
    if not (isinstance(output, Tensor) and isinstance(y, Tensor)):
        return
    try:
        with preserved(output.device), torch.no_grad():
            twice = mean(loss, output.repeat_interleave(2, 0), y.repeat_interleave(2, 0))
    except (RuntimeError, TypeError, ValueError, IndexError):  # a loss of its own that wants the batch as it is
        return
    if value.item() != 0 and abs(twice.item() / value.item() - 2) < 1e-3:
        raise ValueError(
            "the loss is twice as large for a batch that holds each example twice: it is a sum; pass the mean over the"
            " examples."
        )


def total(loss: Loss, output: Any, y: Any, examples: int) -> tuple[float, int]:
    """The sum of a batch's losses, and of how many it is: examples, or targets that count.

    Losses that have a dimension are added up; see partnets.utils.likelihood.counted for those that do not count. A mean
    counts for each target that is a class of the logits [batch, classes, ...] or [batch, ..., classes], but for
    the ignore_index of torch's losses, and for numbers that are no class if the loss does not depend on the logits
    there; for each number of y if the loss is torch's of yes or no, or of counts; otherwise for each example.

    Example:
        >>> logits, y = torch.zeros(2, 5, 3), torch.tensor([[0, 1, -100], [2, -100, -100]])  # [batch, classes, length]
        >>> total(nn.functional.cross_entropy, logits, y, examples=2)  # 3 tokens, each log 5
        (4.828..., 3)
    """
    found, count = summed(loss, output, y, examples)
    return found.item(), count


def summed(loss: Loss, output: Any, y: Any, examples: int) -> tuple[Tensor, int]:
    """As total, of which the sum has a gradient: a scalar of float64 on the CPU.

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
    """Numbers of 16 bits in 32, so that the mean of a batch is not rounded to 8 of them before it is summed."""
    is_low = isinstance(leaf, Tensor) and leaf.dtype in (torch.bfloat16, torch.half)
    return leaf.float() if is_low else leaf


def _targets(loss: Loss, output: Any, y: Any, examples: int) -> int:
    """Return of how many targets a loss is the mean."""
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
    if not isinstance(output, Tensor):  # whose logits nobody can exchange
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
