"""What is asked of any module: where it is, and for a while to learn nothing or to be in evaluation mode."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from partkernels.operators.memory import meeting


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards each module is in training or in evaluation mode as before.

    Example:
        >>> layer = nn.Dropout()
        >>> with modes_kept(layer):
        ...     layer = layer.eval()
        >>> layer.training
        True
    """
    with _in_mode([model], None):
        yield


@contextmanager
def frozen(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, these parameters require no gradient, so that none is computed; afterwards they do as before.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> with frozen([layer.weight]):
        ...     layer.weight.requires_grad, layer.bias.requires_grad
        (False, True)
        >>> layer.weight.requires_grad
        True
    """
    with _requiring(parameters, False):
        yield


@contextmanager
def learning(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, all of these parameters require a gradient; afterwards they do as before.

    Example:
        >>> layer = nn.Linear(2, 1).requires_grad_(False)
        >>> with learning([layer.weight]):
        ...     layer.weight.requires_grad, layer.bias.requires_grad
        (True, False)
        >>> layer.weight.requires_grad
        False
    """
    with _requiring(parameters, True):
        yield


@contextmanager
def _requiring(parameters: Iterable[nn.Parameter], gradient: bool) -> Iterator[None]:
    changed = [parameter for parameter in parameters if parameter.requires_grad != gradient]
    try:
        for parameter in changed:
            parameter.requires_grad_(gradient)
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not gradient)


def is_half(value: Any) -> bool:
    """Whether a value is a tensor of real numbers in less precision than float32.

    Example:
        >>> is_half(torch.ones(1, dtype=torch.float16)), is_half(torch.ones(1)), is_half(None)
        (True, False, False)
    """
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < 4


@contextmanager
def in_float32(module: nn.Module) -> Iterator[None]:
    """Inside, parameters and buffers of less precision are float32; afterwards they are what they were, to the bit.

    Example:
        >>> layer = nn.Linear(2, 1, dtype=torch.bfloat16)
        >>> with in_float32(layer):
        ...     layer.weight.dtype
        torch.float32
        >>> layer.weight.dtype
        torch.bfloat16
    """
    parameters = {parameter: parameter.data for parameter in module.parameters() if is_half(parameter)}
    buffers = [
        (part, name, buffer) for part in module.modules() for name, buffer in part._buffers.items() if is_half(buffer)
    ]
    try:
        for parameter, value in parameters.items():
            parameter.data = value.float()
        for part, name, buffer in buffers:
            part._buffers[name] = buffer.float()
        yield
    finally:
        for parameter, value in parameters.items():
            parameter.data = value
        for part, name, buffer in buffers:
            part._buffers[name] = buffer


@contextmanager
def hooked(
    modules: Iterable[nn.Module], before: Callable | None = None, after: Callable | None = None
) -> Iterator[None]:
    """Inside, before(module, args, kwargs) and after(module, args, kwargs, output) are forward hooks of modules.

    They are the innermost: what other hooks make of the inputs is given to before, and they are given what after makes
    of the output.

    Example:
        >>> seen = []
        >>> with hooked([layer := nn.ReLU()], before=lambda *_: seen.append("before")):
        ...     _ = layer(torch.ones(1))
        >>> layer(torch.ones(1)), seen
        (tensor([1.]), ['before'])
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


def disagreeing(uses: Iterable[tuple[nn.Parameter, nn.Module, Hashable]]) -> set[nn.Module]:
    """The modules that use a parameter in another way than others of them do.

    Args:
        uses: a parameter, a module that has it, and how it uses it.

    Example:
        >>> one, other, third = nn.ReLU(), nn.Tanh(), nn.GELU()
        >>> weight, bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        >>> found = disagreeing([(weight, one, "rows"), (weight, other, "columns"), (bias, third, "rows")])
        >>> found == {one, other}
        True
    """
    ways: dict[nn.Parameter, dict[nn.Module, Hashable]] = defaultdict(dict)
    for parameter, module, way in uses:
        ways[parameter][module] = way
    return {module for found in ways.values() if len(set(found.values())) > 1 for module in found}


def is_frozen(module: nn.Module) -> bool:
    """Whether a module has parameters, of its own or inside, and none that requires a gradient.

    Example:
        >>> is_frozen(nn.Linear(2, 1).requires_grad_(False)), is_frozen(nn.Linear(2, 1)), is_frozen(nn.ReLU())
        (True, False, False)
    """
    return any(True for _ in module.parameters()) and not learns(module)


def learns(module: nn.Module) -> bool:
    """Whether a module has a parameter that requires a gradient, of its own or inside."""
    return any(parameter.requires_grad for parameter in module.parameters())


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Inside, these modules and all in them are in evaluation mode; afterwards each is as it was."""
    with _in_mode(modules, False):
        yield


@contextmanager
def training_quietly(model: nn.Module) -> Iterator[None]:
    """Inside, a model trains, without dropout; what is frozen in a model that trains already stays as it is.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()
        >>> with training_quietly(model):
        ...     [module.training for module in model]
        [True, False]
    """
    noisy = [module for module in model.modules() if isinstance(module, _DropoutNd)]
    with nullcontext() if model.training else training(model), evaluating(*noisy):
        yield


@contextmanager
def training(*modules: nn.Module) -> Iterator[None]:
    """Inside, these modules and all in them are in training mode; afterwards each is as it was.

    Example:
        >>> model = nn.Dropout().eval()
        >>> with training(model):
        ...     model.training
        True
        >>> model.training
        False
    """
    with _in_mode(modules, True):
        yield


@contextmanager
def _in_mode(modules: Collection[nn.Module], mode: bool | None) -> Iterator[None]:
    """Inside, modules are in a mode, or as they are if it is None; afterwards each is as it was."""
    before = {part: part.training for module in modules for part in module.modules()}
    try:
        for module in modules if mode is not None else ():
            module.train(mode)
        yield
    finally:
        for part, was in before.items():
            now = part.training if mode is None else mode
            if was != now and type(part).train is not nn.Module.train:  # which may do more than to say so
                part.train(was)
        for part, was in before.items():
            part.training = was


def overlapping(tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """The names of each two tensors that have an entry of memory in common.

    Example:
        >>> weight = torch.zeros(4, 4)
        >>> overlapping({"top": weight[:2], "rest": weight[2:], "turned": weight.t()})
        [('top', 'turned'), ('rest', 'turned')]
    """
    names = [
        name
        for name, tensor in tensors.items()
        if not (is_lazy(tensor) or tensor.is_meta or is_sharded(tensor)) and tensor.numel()
    ]
    return [(names[i], names[j]) for i, j in sorted(meeting([tensors[name] for name in names]))]


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, of which a rank may hold a part. To import their class takes half a second.

    Example:
        >>> is_sharded(torch.ones(3))
        False
    """
    # A DTensor is never of these two, and what has no such attribute takes long to say so.
    return type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "placements")


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are; the CPU for one without any."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def to_device(value: Any, device: torch.device) -> Any:
    """All tensors in tuples, lists, dicts and other mappings on a device, and what has a method `to` of its own.

    Copies of pinned memory do not wait. All else stays as it is.

    Example:
        >>> to_device({"ids": torch.zeros(2), "length": 2}, torch.device("cpu"))
        {'ids': tensor([0., 0.]), 'length': 2}
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
