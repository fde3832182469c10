"""Recomputation: a layer that is computed anew in the backward pass must be the subnetwork that it was.

torch.utils.checkpoint knows nothing of a layer's `active` and `update`. `checkpoint_contexts` tells it; where nobody
did, `same_subnetwork` raises.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks

from partkernels.operators.memory import no_view
from partnets.nn.live import live
from partnets.nn.partitioned import Partitioned, partitioned_layers


def checkpoint_contexts(model: nn.Module) -> Callable[[], tuple[AbstractContextManager, AbstractContextManager]]:
    """The context_fn with which torch.utils.checkpoint recomputes the subnetwork that was live in the forward pass.

    It is needed where the backward pass runs after partnets.subnetwork was left; inside, it changes nothing. Without
    it such a backward pass raises RuntimeError. Checkpoints with use_reentrant=True take no context_fn: run their
    backward pass inside.

    Args:
        model: what is recomputed, or what it is a part of.

    Example:
        >>> import partnets
        >>> from torch.utils.checkpoint import checkpoint
        >>> layer, x = partnets.Linear(4, 3, proportions=(0.5, 0.5), seed=0), torch.ones(2, 4)
        >>> with partnets.subnetwork(layer, active=1, update=1):
        ...     y = checkpoint(layer, x, use_reentrant=False, context_fn=checkpoint_contexts(layer))
        >>> y.sum().backward()
        >>> layer.bias.grad
        tensor([[2., 2., 2.],
                [0., 0., 0.]])
    """
    return lambda: (nullcontext(), _Again(model))


class _Again(AbstractContextManager):
    """Inside, as often as it is entered, the subnetwork of this moment is live."""

    def __init__(self, model: nn.Module) -> None:
        self.then = {layer: layer.current_subnetwork() for _, layer in partitioned_layers(model)}

    def __enter__(self) -> None:
        self.inside = live(self.then)
        self.inside.__enter__()

    def __exit__(self, *raised) -> None:
        self.inside.__exit__(*raised)


def same_subnetwork(layer: Partitioned, y: Tensor) -> Tensor:
    """The output y of a layer, whose backward pass raises RuntimeError if another subnetwork was recomputed for it."""
    if torch.compiler.is_compiling():  # in a compiled graph active and update are constants
        return y
    if _top_saved_tensors_default_hooks(False) is None:  # with which others recompute
        if torch._C._current_graph_task_id() != -1:  # a reentrant checkpoint's, whose forward was without autograd
            state = layer.current_subnetwork()
            _check(*state, *(layer._live.unlearned or state))
        elif not y.requires_grad:
            layer._live.unlearned = layer.current_subnetwork()
        return y
    if not y.requires_grad:
        return y
    same = _SameSubnetwork.apply(y, *layer.current_subnetwork())
    return same if y.is_leaf or y._is_view() else no_view(same)  # nn.ReLU(inplace=True) may come next


class _SameSubnetwork(torch.autograd.Function):
    """Of one and the same context, attributes are those of the forward pass and saved tensors those recomputed."""

    @staticmethod
    def forward(ctx, y, active, update):
        ctx.active, ctx.update = active, update
        ctx.save_for_backward(torch.tensor([active, update or 0], device="cpu"))
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        active, update = ctx.saved_tensors[0].tolist()
        _check(active, update or None, ctx.active, ctx.update)
        return grad, None, None


def _check(active: int, update: int | None, active_then: int, update_then: int | None) -> None:
    if (active, update) != (active_then, update_then):
        raise RuntimeError(
            f"a checkpoint recomputed subnetwork active={active}, update={update} of a layer that had"
            f" active={active_then}, update={update_then} in the forward pass; call backward inside"
            " partnets.subnetwork, or pass context_fn=partnets.checkpoint_contexts(model) and use_reentrant=False to"
            " torch.utils.checkpoint.checkpoint."
        )
