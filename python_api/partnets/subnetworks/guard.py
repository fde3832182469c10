"""Guards: a backward pass while the model is another subnetwork than that which computed its outputs raises.

torch raises where a weight has changed that the backward pass needs. It needs none of a module whose inputs require no
gradient, such as the first layer, and none changes between two subnetworks that differ in `update`. So the outputs of
all partitioned modules are guarded. torch.utils.checkpoint computes outputs again in the backward pass: that raises
unless the model is the subnetwork that computed last.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from partnets.subnetworks.state import PartitionState


def guard(module: nn.Module, state: PartitionState) -> None:
    """Guard the outputs of a partitioned module, by a hook that its copies have too."""
    if not any(map(_is_guard, module._forward_hooks.values())):
        module.register_forward_hook(partial(_guard_outputs, state))


def unguard(module: nn.Module) -> None:
    """Remove the guards of a module's outputs."""
    for key in [key for key, hook in module._forward_hooks.items() if _is_guard(hook)]:
        del module._forward_hooks[key]


def _is_guard(hook) -> bool:
    return isinstance(hook, partial) and hook.func is _guard_outputs


def _guard_outputs(state: PartitionState, module: nn.Module, inputs: tuple, output):
    if torch.compiler.is_compiling():
        return output
    now = state.active, state.update
    if torch._C._current_graph_task_id() == -1:
        state.called = now
    elif state.called != now:
        raise _other_subnetwork(state.called)
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return output
    hook = partial(_hooked, state, now)
    return hook(output) if isinstance(output, Tensor) else tree_map(hook, output)


def _hooked(state: PartitionState, then: tuple[int, int | None], tensor: Any) -> Any:
    if isinstance(tensor, Tensor) and tensor.requires_grad:
        tensor = tensor.view_as(tensor) if tensor.is_leaf else tensor
        tensor.register_hook(partial(_check, state, then))
    return tensor


def _check(state: PartitionState, then: tuple[int, int | None], grad: Tensor) -> None:
    if (state.active, state.update) != then:
        raise _other_subnetwork(then)


def _other_subnetwork(then: tuple[int, int | None]) -> RuntimeError:
    active, update = then
    return RuntimeError(
        f"this was computed by subnetwork active={active}, update={update}, and the model is another now; compute"
        f" the loss and call backward inside of partnets.subnetwork(model, {active}, {update})."
    )
