"""Helpers for any module: its device, and contexts that freeze it or change its mode."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from partkernels.operators.memory import meeting

# A model that a function changes in place and returns.
Model = TypeVar("Model", bound=nn.Module)


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules of model.modules(), in a fifth of the time, for code that runs in each step."""
    found: dict[int, nn.Module] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            own = module.__dict__
            children = own["_modules"].values() if "_modules" in own else list(module.children())  # of compiled code
            if children:
                waiting.extend(child for child in reversed(children) if child is not None)
    return [*found.values()]


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore each module's training or evaluation mode on exit."""
    with _in_mode([model], None):
        yield


@contextmanager
def frozen(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Set requires_grad of parameters to False in the context, so that no gradient is computed; restore it on exit."""
    changed = [parameter for parameter in parameters if parameter.requires_grad]
    try:
        for parameter in changed:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(True)


@contextmanager
def hooked(
    modules: Iterable[nn.Module], before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Register forward hooks before(module, args, kwargs) and after(module, args, kwargs, output) in the context.

    They are the innermost hooks: before gets the inputs that other hooks return, and other hooks get the output that
    after returns.
    """
    hooks = []
    try:
        for module in modules:
            if before is not None:
                hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            if after is not None:
                hooks.append(module.register_forward_hook(after, with_kwargs=True, prepend=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def is_frozen(module: nn.Module) -> bool:
    """Return whether a module has parameters, also in submodules, and none of them requires a gradient."""
    learning = [parameter.requires_grad for parameter in module.parameters()]
    return bool(learning) and not any(learning)


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Set modules and their submodules to evaluation mode in the context; restore each mode on exit."""
    with _in_mode(modules, False):
        yield


@contextmanager
def training(*modules: nn.Module) -> Iterator[None]:
    """Set modules and their submodules to training mode in the context; restore each mode on exit."""
    with _in_mode(modules, True):
        yield


@contextmanager
def _in_mode(modules: Collection[nn.Module], mode: bool | None) -> Iterator[None]:
    """Set modules to a mode in the context, or keep their modes if mode is None; restore each mode on exit."""
    before = {part: part.training for module in modules for part in module.modules()}
    try:
        for module in modules if mode is not None else ():
            module.train(mode)
        yield
    finally:
        for part, was in before.items():
            now = part.training if mode is None else mode
            if was != now and type(part).train is not nn.Module.train:  # an override may do more than set the flag
                part.train(was)
        for part, was in before.items():
            part.training = was


def overlapping(tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Return the pairs of names of tensors that share memory."""
    names = [
        name
        for name, tensor in tensors.items()
        if not (is_lazy(tensor) or tensor.is_meta or is_sharded(tensor)) and tensor.numel()
    ]
    return [(names[i], names[j]) for i, j in sorted(meeting([tensors[name] for name in names]))]


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing the class, which takes half a second."""
    # A DTensor is never of these two types; for them, a lookup of a missing attribute would be slow.
    return type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "placements")


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter; the CPU if it has no parameters."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def to_device(value: Any, device: torch.device) -> Any:
    """Move tensors and objects with a method `to`, in tuples, lists, dicts and other mappings, to a device.

    Copies from pinned memory are non-blocking. Other values are returned unchanged.
    """

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=leaf.is_pinned())
        if _has_to(leaf):  # transformers' BatchEncoding, a PackedSequence, a graph
            return leaf.to(device)
        return {name: to_device(part, device) for name, part in leaf.items()} if isinstance(leaf, Mapping) else leaf

    return tree_map(moved, value, is_leaf=_has_to)


def _has_to(value: Any) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "to", None))
