"""subnetwork: which subnetwork of a model computes, and which partition learns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from partkernels.operators import check_live
from partnets.partitioned import count, partitioned_layers


@contextmanager
def subnetwork(model: nn.Module, active: int, update: int | None = None) -> Iterator[None]:
    """Inside, the model is its subnetwork w_s^(active), and gradients reach partition `update` only (Eq. 3).

    With update=None no parameter of a partitioned layer receives a gradient, and none is computed (Eq. 4). The backward
    pass may run inside or outside. On leaving, also by an exception, every layer is as before.

    Args:
        model: with partitioned layers, all of C partitions; or such a layer.
        active: k, 1..C.
        update: 1..active, or None.

    Raises:
        ValueError: active or update is out of range, or the model has no partitioned layers; nothing has changed then.

    Example:
        >>> import torch, partnets
        >>> layer = partnets.Linear(4, 3, proportions=(0.5, 0.5), seed=0)
        >>> with subnetwork(layer, active=1, update=1):
        ...     layer(torch.ones(2, 4)).sum().backward()
        >>> layer.bias.grad
        tensor([[2., 2., 2.],
                [0., 0., 0.]])
    """
    count(model)
    layers = [layer for _, layer in partitioned_layers(model)]
    check_live(layers[0], active, update)  # of a partition it reads the count alone
    before = [(layer.active, layer.update) for layer in layers]
    try:
        for layer in layers:
            layer.active, layer.update = active, update
        yield
    finally:
        for layer, (active, update) in zip(layers, before, strict=True):
            layer.active, layer.update = active, update
