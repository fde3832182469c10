"""Guards: a backward pass raises if the model is no longer the subnetwork that computed the outputs.

torch raises if a weight that the backward pass needs was written into; Switch.renew counts as a write. It needs no
weight of a module whose inputs require no gradient, such as the first layer. So outputs are guarded: in a call of the
model its own, and those of partitioned modules whose inputs require no gradient; in other calls those of all
partitioned modules. torch.utils.checkpoint computes outputs again in the backward pass: that raises unless the model is
the subnetwork that computed last.
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
    if not any(_is(hook, _guard_outputs) for hook in module._forward_hooks.values()):
        module.register_forward_hook(partial(_guard_outputs, state))


def guard_calls(model: nn.Module, states: list[PartitionState]) -> None:
    """Guard the outputs of a model's calls, by hooks that its copies have too.

    Args:
        model: one that has no PartitionState itself.
        states: those of its modules.
    """
    _remove(model, _begin, _end)
    model.register_forward_pre_hook(partial(_begin, states))
    model.register_forward_hook(partial(_end, states), always_call=True)


def unguard(module: nn.Module) -> None:
    """Remove the guards of a module's outputs."""
    _remove(module, _guard_outputs, _begin, _end)


def _remove(module: nn.Module, *functions) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if _is(hook, *functions)]:
            del hooks[key]


def _is(hook, *functions) -> bool:
    return isinstance(hook, partial) and hook.func in functions


def _begin(states: list[PartitionState], model: nn.Module, inputs: tuple) -> None:
    if not torch.compiler.is_compiling() and states[0].entry.thread is not None:
        for entry in {state.entry for state in states}:
            entry.running += 1


def _end(states: list[PartitionState], model: nn.Module, inputs: tuple, output):
    if torch.compiler.is_compiling() or states[0].entry.thread is None:
        return output
    for entry in {state.entry for state in states}:
        entry.running -= 1
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return output
    return _guarded(states[0], output)


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
    if state.entry.running > 0 and any(isinstance(one, Tensor) and one.requires_grad for one in inputs):
        return output
    return _guarded(state, output)


def _guarded(state: PartitionState, output):
    if isinstance(output, Tensor) and not output.requires_grad:
        return output
    hook = partial(_hooked, state, (state.active, state.update))
    return hook(output) if isinstance(output, Tensor) else tree_map(hook, output)


def _hooked(state: PartitionState, then: tuple[int, int | None], tensor: Any) -> Any:
    if isinstance(tensor, Tensor) and tensor.requires_grad:
        tensor = tensor.view_as(tensor) if tensor.is_leaf else tensor
        tensor.grad_fn.register_prehook(partial(_check, state, then))
    return tensor


def _check(state: PartitionState, then: tuple[int, int | None], grads: tuple) -> None:
    if (state.active, state.update) != then:
        raise _other_subnetwork(then)


def _other_subnetwork(then: tuple[int, int | None]) -> RuntimeError:
    active, update = then
    return RuntimeError(
        f"this was computed by subnetwork active={active}, update={update}, and the model is another now; compute"
        f" the loss and call backward inside of partnets.subnetwork(model, {active}, {update})."
    )
