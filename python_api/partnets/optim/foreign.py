"""Other optimisers step all partitions at once: they are stopped before they do."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from partnets.nn.partitioned import EXISTING
from partnets.optim.base import PartitionedOptimizer

# How many parameters an optimiser had when none of them was one of several partitions.
_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def refuse_partitioned(optimizer: torch.optim.Optimizer, args: tuple = (), kwargs: Any = None) -> None:
    """Raises RuntimeError if an optimiser of others is about to step a parameter that several partitions own.

    A step by the gradient of w_k would move all partitions by momentum and decay, with what chunk k has taught. Looked
    at once for each optimiser, and again when it has got more parameters.

    Example:
        >>> import partnets
        >>> model = partnets.partition(nn.Linear(4, 2), (0.5, 0.5))
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> model(torch.ones(4)).sum().backward()
        >>> optimizer.step()
        Traceback (most recent call last):
        RuntimeError: Adam is about to step a parameter of a Linear with 2 partitions, all of them at once: ...
    """
    if isinstance(optimizer, PartitionedOptimizer):
        return
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _known.get(optimizer) == count:
        return
    stepped = {p for group in optimizer.param_groups for p in group["params"] if isinstance(p, nn.Parameter)}
    if not stepped:  # an optimiser of gathered entries lives for one step
        return
    several = [layer for layer in list(EXISTING) if layer.count > 1]
    ours = [(layer, parameter) for layer in several for _, parameter in layer.owned() if parameter in stepped]
    if not ours:
        _known[optimizer] = count
    for layer, parameter in ours:
        if parameter.requires_grad:  # those that are frozen may be unfrozen later
            name = type(optimizer).__name__
            raise RuntimeError(
                f"{name} is about to step a parameter of a {type(layer).__name__} with {layer.count} partitions, all of"
                " them at once: its momentum and decay would move partitions that the batch must not reach. Take"
                f" partnets.optim.{name if name in ('SGD', 'AdamW') else 'Adam'}(model) (any other of torch's comes"
                " through optim.PerPartition), with partnets.step_weights. An optimiser of ψ gets ψ alone, as"
                " hyper.hyperparameters(model) has it. partnets.merge makes an ordinary model for any optimiser."
            )


register_optimizer_step_pre_hook(refuse_partitioned)
