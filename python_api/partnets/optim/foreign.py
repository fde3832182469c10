"""Other optimisers step all partitions at once: they are stopped before they do."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from partnets.nn.partitioned import EXISTING, REPLACED
from partnets.optim.base import PartitionedOptimizer

# How many parameters an optimiser had, and how many partitioned modules had been made, when all was well with it.
_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()


def refuse_partitioned(optimizer: torch.optim.Optimizer, args: tuple = (), kwargs: Any = None) -> None:
    """Raises RuntimeError if an optimiser of others is about to step a parameter that several partitions own.

    A step by the gradient of w_k would move all partitions by momentum and decay, with what chunk k has taught. And an
    optimiser that was made before partnets.partition holds parameters that no model has any more. Looked at once for
    each optimiser, and again when it has got more parameters or a model is partitioned.

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
    seen = sum(len(group["params"]) for group in optimizer.param_groups), EXISTING.made
    if _known.get(optimizer) == seen:
        return
    stepped = {p for group in optimizer.param_groups for p in group["params"] if isinstance(p, nn.Parameter)}
    if not stepped:  # an optimiser of gathered entries lives for one step
        return
    several = [layer for layer in list(EXISTING) if layer.count > 1]
    ours = [(layer, parameter) for layer in several for _, parameter in layer.owned() if parameter in stepped]
    lost = [parameter for parameter in stepped if parameter.grad is None and parameter in REPLACED]
    if lost:
        raise RuntimeError(
            f"{type(optimizer).__name__} holds {len(lost)} parameters that partnets.partition has replaced, and would"
            " train nothing of the model; make the optimiser after partnets.partition: one of partnets.optim for the"
            " weights, and for ψ one of hyper.hyperparameters(model)."
        )
    if not ours:
        _known[optimizer] = seen
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
