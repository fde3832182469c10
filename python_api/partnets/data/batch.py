"""The convention for calls of models with a batch, shared by Trainer, lml and all other evaluations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# Names of the targets in a batch.
LABELS = ("labels", "label", "targets", "target")
OWN_RULE = "or pass forward=, a function of model and batch that returns (output, targets)"

CHANNELS_LAST = "If its last dimension has the channels, pass x.permute(0, 3, 1, 2)."

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


def tried(model: nn.Module, batch: Any, forward: Forward) -> tuple[Any, Any]:
    """Return the output of a model and the targets of a batch.

    Raises:
        ValueError: the model does not take the batch (the error has the shape of the inputs), or forward does not
            return a pair.
    """
    try:
        found = forward(model, batch)
    except (RuntimeError, TypeError) as error:
        hint = described(batch)
        if not hint:
            raise
        own = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        x = batch[0]
        if own and isinstance(x, Tensor) and x.is_floating_point() and x.dtype != own:
            hint += f" The network has {own}: pass x.to({own}), or network.to({x.dtype})."
        raise ValueError(f"the model does not take a batch of these data: {error}.{hint}") from error
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise ValueError(f"forward returned a {type(found).__name__}; return the output and the targets.")
    return found


def has_channels_last(x: Any) -> bool:
    """Return whether a tensor looks like colour images [n, height, width, 3]."""
    return isinstance(x, Tensor) and x.dim() == 4 and x.shape[-1] == 3 and min(x.shape[1:3]) > 4


def described(batch: Any) -> str:
    """Return the shape and dtype of a batch's inputs with usual remedies, or "" if the inputs are not tensors."""
    x = batch[0] if isinstance(batch, tuple | list) and batch else None
    if isinstance(x, tuple | list):
        return " If the network has several inputs, pass forward=lambda network, batch: (network(*batch[0]), batch[1])."
    if not isinstance(x, Tensor):
        return ""
    hint = ""
    if x.dim() == 3:
        hint += " Images need a dimension for their channels: x.unsqueeze(1) for grey ones."
    if has_channels_last(x):
        hint += f" {CHANNELS_LAST}"
    if x.dtype == torch.uint8:
        hint += " For images pass x.float() / 255, or put data.ToFloat before the network."
    return f" x is {list(x.shape)} of {x.dtype}.{hint}"
