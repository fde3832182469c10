"""subnetwork: which subnetwork of a model computes, and which partition learns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from partkernels.operators.checks import check_live
from partnets.nn.partitioned import Partitioned, count, partitioned_layers


@contextmanager
def subnetwork(model: nn.Module, active: int, update: int | None = None) -> Iterator[None]:
    """Inside, the model is its subnetwork w_s^(active), and gradients reach partition `update` only (Eq. 3).

    With update=None no parameter of a partitioned layer receives a gradient, and none is computed (Eq. 4). The backward
    pass may run inside or outside; outside, activation checkpoints need partnets.checkpoint_contexts. On leaving, also
    by an exception, every layer is as before.

    Under torch.compile each pair of active and update is a compilation of its own, C (C + 3) / 2 in all. Past
    torch._dynamo.config.recompile_limit, 8, torch runs the rest uncompiled and warns, or raises with fullgraph=True:
    from C = 3 on set that limit, or torch.compile's argument of this name, to as many.

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
    before = Live(layers)
    try:
        for layer in layers:
            layer.active, layer.update = active, update
        yield
    finally:
        before.restore()


class Live:
    """What `active` and `update` of some layers are at this moment."""

    def __init__(self, layers: Iterable[Partitioned]) -> None:
        self.states = [(layer, layer.active, layer.update) for layer in layers]

    def restore(self) -> None:
        for layer, active, update in self.states:
            layer.active, layer.update = active, update
