"""What is asked of any module: where it is, and for a while to learn nothing or to be in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


@contextmanager
def frozen(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, these parameters require no gradient, so that none is computed; afterwards they do as before.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> with frozen([layer.weight]):
        ...     layer.weight.requires_grad, layer.bias.requires_grad
        (False, True)
        >>> layer.weight.requires_grad
        True
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Inside, these modules and all in them are in evaluation mode; afterwards each is as it was."""
    training = [part for module in modules for part in module.modules() if part.training]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for part in training:
            part.training = True


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are; the CPU for one without any."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def to_device(value: Any, device: torch.device) -> Any:
    """A tensor, or each tensor in tuples, lists and dicts, on a device; all else as it is.

    Example:
        >>> to_device({"ids": torch.zeros(2), "length": 2}, torch.device("cpu"))
        {'ids': tensor([0., 0.]), 'length': 2}
    """
    if isinstance(value, Tensor):
        return value.to(device)
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)
