"""Gradients of partitioned parameters: masked to the partition that learns; other vectors' gradients are stored."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from partkernels.backend import dispatch
from partkernels.operators.subnetwork_weight import select
from partnets.subnetworks.exchanged import Vector, Weight
from partnets.subnetworks.state import PER_EXAMPLE
from partnets.utils.modules import is_sharded
from partnets.utils.shards import local, part, sharded_like, version

# What `grad_seen` has of a parameter without a gradient.
NO_GRADIENT = 0, 0, None


def watch(one: Weight | Vector, parameter: nn.Parameter) -> None:
    """Mask the gradients of a parameter, or of one gathered from its shards, to the partition that learns."""
    if not parameter.requires_grad or (torch.compiler.is_compiling() and id(parameter) in one.hooked):
        return  # torch.compile does not see existing hooks
    one.hooked.add(id(parameter))
    hooks = parameter._backward_hooks or {}
    mask = mask_weight if isinstance(one, Weight) else mask_vector
    before = [key for key, hook in hooks.items() if isinstance(hook, partial) and hook.func is mask]
    if before and hooks[before[0]].args[0].state is not None:
        return
    for key in before:  # of a module that is gone
        del hooks[key]
    handle = parameter.register_hook(partial(mask, one))
    if parameter is one.parameter:
        one.hook = handle.id
    elif isinstance(one, Vector):
        _note_accumulated(one, parameter)
    elif id(one.parameter) not in one.accumulating:
        one.accumulating.add(id(one.parameter))
        one.parameter.register_post_accumulate_grad_hook(partial(_mask_shard, one))


def mask_weight(one: Weight, grad: Tensor) -> Tensor | None:
    """Return the gradient with zeros outside of the partition that learns."""
    state = one.state
    if state is None or not (state.entry.masks or torch.is_grad_enabled()):  # gradients of gradients are of masked ones
        return None
    if state.num_partitions == 1 or state.update == PER_EXAMPLE:
        return None
    if state.update is None:
        return torch.zeros_like(grad)
    if state.is_gathered and not is_sharded(grad):
        has_other = one.parameter.grad is not None and state.grad_of.get(one.name) != state.update
        state.grad_of[one.name] = 0 if has_other else state.update
        if not has_other:
            return None  # _mask_shard masks this rank's part of the mean
    if (map := one.map_of(grad)) is None:
        return None
    selected = select(local(grad), state.update, state.update, map, state.num_partitions, dispatch.requested())
    return sharded_like(selected, grad)


@torch.no_grad()
def _mask_shard(one: Weight, parameter: nn.Parameter) -> None:
    """Mask this rank's part of a gradient, after it was reduced, unless it is of several partitions."""
    state = one.state
    if state is None or not state.update or state.grad_of.get(one.name) != state.update:
        return
    if (masked := mask_weight(one, parameter.grad)) is not None:
        local(parameter.grad).copy_(local(masked))  # in place, as it shares the memory of its unit's gradients


def mask_vector(one: Vector, grad: Tensor) -> Tensor | None:
    """Return the gradient by the vector of the partition that learns; `.grad` is of one partition at a time."""
    state = one.state
    if state is None or state.num_partitions == 1 or state.update == PER_EXAMPLE:
        return None
    if state.update is None:
        return torch.zeros_like(grad)
    accumulates, entry = _accumulates(), state.entry
    if accumulates:
        _expect(one, state.update)
    if not one.is_product or state.active == 1:
        return None
    by, name = (state.active, state.update), one.name
    if accumulates and name in state.unscaled and (state.unscaled[name] != by or torch.is_grad_enabled()):
        scale_gradient(one)
    if accumulates and not entry.masks and not torch.is_grad_enabled():
        if name in state.unscaled:
            return None
        if one.parameter.grad is None:
            state.unscaled[name] = by
            entry.unscaled.append(one)
            return None
    return sharded_like(local(grad) * part(_others(one, *by), grad).to(grad.dtype), grad)


def _others(one, active: int, update: int) -> Tensor:
    """Return the product of the vectors of all active partitions but the one that learns."""
    return torch.cat([one.rows[: update - 1], one.rows[update:active]]).prod(0)


@torch.no_grad()
def scale_gradient(one: Any) -> None:
    """Multiply the gradient of a scale by the vectors of other partitions, if that is still to be done."""
    by, parameter = one.state.unscaled.pop(one.name, None), one.parameter
    if by is not None and parameter.grad is not None:
        local(parameter.grad).mul_(part(_others(one, *by), parameter))
        note_scaled([one], by[1])


def note_scaled(scales: list[Any], update: int) -> None:
    """Note the gradients of scales again that were noted before they were multiplied."""
    for one in scales:
        if one.name in one.state.grad_seen:
            note_gradient(one, update)


def _accumulates() -> bool:
    """Return whether a hook's gradient will be added to `.grad`, not returned by torch.autograd.grad."""
    node = torch._C._current_autograd_node()
    try:
        return node is None or torch._C._will_engine_execute_node(node)
    except RuntimeError:  # in torch.autograd.grad
        return False


def _expect(one: Vector, update: int) -> None:
    """Make `.grad` that of partition `update`, before a gradient is added to it."""
    state, name = one.state, one.name
    if state.grads or state.grad_of.get(name, update) != update:
        turn_gradient(one, update)
    if state.entry.masks or state.grads.get(name):
        _note_accumulated(one, one.parameter)
    elif id(one.parameter) not in one.accumulating:  # step_weights clears the gradients of its steps
        state.grad_of[name] = update


def _note_accumulated(one: Vector, parameter: nn.Parameter) -> None:
    """Note each gradient that accumulates in a parameter, which others may change or another partition add to."""
    if id(parameter) not in one.accumulating:
        one.accumulating.add(id(parameter))
        parameter.register_post_accumulate_grad_hook(partial(_accumulated, one))


def have_other_hooks(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether parameters have hooks of their gradients that are not from this module."""
    ours = mask_weight, mask_vector, _accumulated
    for parameter in parameters:
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
            for hook in hooks.values() if hooks else ():
                if type(hook) is not partial or hook.func not in ours:
                    return True
    return False


def _accumulated(one: Vector, _: nn.Parameter) -> None:
    if one.state is not None and one.state.update not in (None, PER_EXAMPLE):
        note_gradient(one, one.state.update)


def note_gradient(one: Any, k: int) -> None:
    """Note that `.grad` of a vector is the gradient of partition k as it is now."""
    state, name, grad = one.state, one.name, one.parameter.grad
    state.grad_of[name] = k
    if grad is not None:  # FSDP moves that of a gathered parameter
        # Only a copy shows writes by `.data` and by GradScaler.
        is_copied = state.grads.get(name) and not _has_ranks()
        state.grad_seen[name] = id(grad), version(grad), grad.detach().clone() if is_copied else None


def is_assigned(one: Any) -> bool:
    """Return whether `.grad` is another tensor than the one that a backward pass has accumulated."""
    seen, grad = one.state.grad_seen.get(one.name), one.parameter.grad
    return seen is not None and grad is not None and seen[0] != id(grad) and not _has_ranks()


def _is_changed(one) -> bool:
    """Return whether `.grad` has changed since it was noted, as far as that can be seen."""
    grad = one.parameter.grad
    if grad is None or (seen := one.state.grad_seen.get(one.name)) is None:
        return False
    *numbers, copied = seen
    if copied is None:
        return numbers != [id(grad), version(grad)]
    return copied.shape != grad.shape or not torch.allclose(copied, grad.detach(), rtol=0, atol=0, equal_nan=True)


def add_gradient(one: Any, k: int, grad: Tensor) -> None:
    """Add to the gradient of a vector of partition k, and make it `.grad`."""
    turn_gradient(one, k)
    parameter = one.parameter
    parameter.grad = grad.clone() if parameter.grad is None else parameter.grad + grad
    note_gradient(one, k)


def turn_gradient(one: Any, k: int) -> None:
    """Make a vector's `.grad` the gradient of partition k, and set that of another partition aside."""
    state, parameter, name = one.state, one.parameter, one.name
    scale_gradient(one)
    forget_cleared(one)
    check_kept(one)
    before = state.grad_of.get(name)
    if parameter.grad is None or before in (None, k):
        return
    kept = state.grads.setdefault(name, {})
    is_changed = _is_changed(one) and (before not in kept or (name, before) in state.grads_changed)
    (state.grads_changed.add if is_changed else state.grads_changed.discard)((name, before))
    # A copy, as DistributedDataParallel writes the next gradient into the same memory.
    kept[before] = kept[before] + parameter.grad if before in kept else parameter.grad.clone()
    parameter.grad = kept.pop(k, None)
    if parameter.grad is None:
        del state.grad_of[name]
        state.grad_seen[name] = NO_GRADIENT
    else:
        note_gradient(one, k)


def forget_cleared(one: Any) -> None:
    """Delete stored gradients of other partitions if `.grad` was set to None since, as by model.zero_grad()."""
    if one.parameter.grad is None and one.name in one.state.grad_of:
        one.state.grads.pop(one.name, None)
        del one.state.grad_of[one.name]


def _has_ranks() -> bool:
    is_initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return is_initialized and torch.distributed.get_world_size() > 1


def check_kept(one: Any) -> None:
    """Raise RuntimeError if `.grad` was changed, such as by clipping, but not all stored gradients of other partitions.

    If `.grad` was set to 0, the stored gradients are deleted.
    """
    state, waiting = one.state, one.state.grads.get(one.name)
    if not waiting or _has_ranks() or not _is_changed(one):  # DistributedDataParallel writes into gradients
        return
    if not one.parameter.grad.any():
        state.grads.pop(one.name)
        return
    if unchanged := [k for k in waiting if (one.name, k) not in state.grads_changed]:
        raise RuntimeError(
            f"the gradient of the {one.name} of a {type(one.module).__name__} was changed while that of partition"
            f" {unchanged[0]} waits for its step: take the step of each partition, or unscale and clip its gradients,"
            " before another one learns."
        )
