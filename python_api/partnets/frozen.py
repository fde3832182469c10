"""frozen: parameters that require no gradient for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


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
