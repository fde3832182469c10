"""Gradients of partitioned parameters: masked to the partition that learns; other vectors' gradients are stored."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from partkernels.backend import dispatch
from partkernels.operators.subnetwork_weight import select
from partnets.subnetworks.exchanged import Vector, Weight
from partnets.subnetworks.state import PER_EXAMPLE
from partnets.utils.shards import local, part, sharded_like, version

# What `grad_seen` has of a parameter without a gradient.
NO_GRADIENT = 0, 0


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


def mask_weight(one: Weight, grad: Tensor) -> Tensor | None:
    """Return the gradient with zeros outside of the partition that learns."""
    state = one.state
    if state is None or (
        not state.entry.masks and not torch.is_grad_enabled()
    ):  # gradients of gradients are of masked ones
        return None
    if state.num_partitions == 1 or state.update == PER_EXAMPLE:
        return None
    if state.update is None:
        return torch.zeros_like(grad)
    if (map := one.map_of(grad)) is None:
        return None
    selected = select(local(grad), state.update, state.update, map, state.num_partitions, dispatch.requested())
    return sharded_like(selected, grad)


def mask_vector(one: Vector, grad: Tensor) -> Tensor | None:
    """Return the gradient by the vector of the partition that learns; `.grad` is of one partition at a time."""
    state = one.state
    if state is None or state.num_partitions == 1 or state.update == PER_EXAMPLE:
        return None
    update = state.update
    if update is None:
        return torch.zeros_like(grad)
    name = one.name
    if state.grads or state.grad_of.get(name, update) != update:
        turn_gradient(one, update)
    if _accumulates():
        state.grad_of[name] = update
        if state.grads.get(name):
            _note_accumulated(one, one.parameter)
    if not one.is_product or state.active == 1:
        return None
    if not state.entry.masks and not torch.is_grad_enabled():
        unscaled = state.entry.unscaled
        if one in unscaled:
            return None
        if one.parameter.grad is None:
            unscaled.append(one)
            return None
    rows = one.rows
    factor = torch.cat([rows[: update - 1], rows[update : state.active]]).prod(0)
    return sharded_like(local(grad) * part(factor, grad).to(grad.dtype), grad)


def _accumulates() -> bool:
    """Return whether a hook's gradient will be added to `.grad`, not returned by torch.autograd.grad."""
    node = torch._C._current_autograd_node()
    try:
        return node is None or torch._C._will_engine_execute_node(node)
    except RuntimeError:  # in torch.autograd.grad
        return False


def _note_accumulated(one: Vector, parameter: nn.Parameter) -> None:
    """Note each gradient that accumulates in a parameter, which is needed while those of other partitions wait."""
    if id(parameter) not in one.accumulating:
        one.accumulating.add(id(parameter))
        parameter.register_post_accumulate_grad_hook(lambda _: _accumulated(one))


def _accumulated(one: Vector) -> None:
    if one.state is not None and one.state.update not in (None, PER_EXAMPLE):
        note_gradient(one, one.state.update)


def note_gradient(one, k: int) -> None:
    """Note that `.grad` of a vector is the gradient of partition k as it is now."""
    one.state.grad_of[one.name], grad = k, one.parameter.grad
    if grad is not None:  # FSDP moves that of a gathered parameter
        one.state.grad_seen[one.name] = id(grad), version(grad)


def add_gradient(one, k: int, grad: Tensor) -> None:
    """Add to the gradient of a vector of partition k, and make it `.grad`."""
    turn_gradient(one, k)
    parameter = one.parameter
    parameter.grad = grad.clone() if parameter.grad is None else parameter.grad + grad
    note_gradient(one, k)


def turn_gradient(one, k: int) -> None:
    """Make a vector's `.grad` the gradient of partition k, and set that of another partition aside."""
    state, parameter = one.state, one.parameter
    forget_cleared(one)
    check_kept(one)
    before = state.grad_of.get(one.name)
    if parameter.grad is not None and before not in (None, k):
        kept = state.grads.setdefault(one.name, {})
        # A copy, as DistributedDataParallel writes the next gradient into the same memory.
        kept[before] = kept[before] + parameter.grad if before in kept else parameter.grad.clone()
        parameter.grad = kept.pop(k, None)
        if parameter.grad is None:
            del state.grad_of[one.name]
            state.grad_seen[one.name] = NO_GRADIENT
        else:
            note_gradient(one, k)


def forget_cleared(one) -> None:
    """Delete stored gradients of other partitions if `.grad` was set to None since, as by model.zero_grad()."""
    if one.parameter.grad is None and one.name in one.state.grad_of:
        one.state.grads.pop(one.name, None)
        del one.state.grad_of[one.name]


def _has_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def check_kept(one) -> None:
    """Raise RuntimeError if `.grad` was changed, such as by clipping, without the stored gradients of other partitions.

    If `.grad` was set to 0, the stored gradients are deleted.
    """
    state, grad = one.state, one.parameter.grad
    if grad is None or not state.grads.get(one.name) or one.name not in state.grad_seen:
        return
    if state.grad_seen[one.name] == (id(grad), version(grad)) or _has_ranks():
        return  # DistributedDataParallel writes into gradients
    if not grad.any():
        state.grads.pop(one.name)
        return
    raise RuntimeError(
        f"the gradient of the {one.name} of a {type(one.module).__name__} was changed while that of partition"
        f" {next(iter(state.grads[one.name]))} waits for its step: take the step of each partition, or unscale and clip"
        " its gradients, before another one learns."
    )
