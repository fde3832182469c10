"""Guards: a backward pass while the model is another subnetwork than that which computed its outputs raises.

torch raises where a weight has changed that the backward pass needs. It needs none of a module whose inputs require no
gradient, such as the first layer, and none changes between two subnetworks that differ in `update`. So the outputs of
such modules and of the model are guarded. torch.utils.checkpoint computes outputs again in the backward pass: that
raises unless the model is the subnetwork that computed last.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from partkernels.operators.memory import no_view
from partnets.subnetworks.state import PartitionState


def guard_model(model: nn.Module, state: PartitionState) -> None:
    """Guard the outputs of model(...)."""
    _add(model, partial(_guard_outputs, state, False))


def guard_module(module: nn.Module, state: PartitionState) -> None:
    """Guard the outputs of a partitioned module whose inputs require no gradient."""
    _add(module, partial(_guard_outputs, state, True))


def unguard(module: nn.Module) -> None:
    """Remove the guards of a module's outputs."""
    for key in [key for key, hook in module._forward_hooks.items() if _is_guard(hook)]:
        del module._forward_hooks[key]


def _add(module: nn.Module, guard: partial) -> None:
    hooks = module._forward_hooks.values()
    if not any(_is_guard(hook) and hook.args == guard.args for hook in hooks):
        module.register_forward_hook(guard)


def _is_guard(hook) -> bool:
    return isinstance(hook, partial) and hook.func is _guard_outputs


def _guard_outputs(state: PartitionState, only_first: bool, module: nn.Module, inputs: tuple, output):
    if torch.compiler.is_compiling():
        return output
    now = state.active, state.update
    if torch._C._current_graph_task_id() == -1:
        state.called = now
    elif state.called != now:
        raise _other_subnetwork(state.called)
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return output
    if only_first and any(isinstance(one, Tensor) and one.requires_grad for one in inputs):
        return output
    guard = partial(_guard, state)
    return guard(output) if isinstance(output, Tensor) else tree_map(guard, output)


def _guard(state: PartitionState, tensor: Any) -> Any:
    if not (isinstance(tensor, Tensor) and tensor.requires_grad):
        return tensor
    guarded = _SameSubnetwork.apply(tensor, state)
    return guarded if tensor.is_leaf or tensor._is_view() else no_view(guarded)


class _SameSubnetwork(torch.autograd.Function):
    """The identity, with a backward pass that raises unless the subnetwork of the forward pass is active."""

    @staticmethod
    def forward(ctx, tensor, state):
        ctx.state, ctx.then = state, (state.active, state.update)
        return tensor.view_as(tensor)

    @staticmethod
    def jvp(ctx, tangent, _):
        return tangent.view_as(tangent)

    @staticmethod
    def backward(ctx, grad):
        if (ctx.state.active, ctx.state.update) != ctx.then:
            raise _other_subnetwork(ctx.then)
        return grad, None


def _other_subnetwork(then: tuple[int, int | None]) -> RuntimeError:
    active, update = then
    return RuntimeError(
        f"this was computed by subnetwork active={active}, update={update}, and the model is another now; call backward"
        f" inside of partnets.subnetwork(model, {active}, {update})."
    )
