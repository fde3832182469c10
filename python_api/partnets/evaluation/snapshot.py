"""Snapshot: a model's state between two calls, which can be compared and restored."""

from __future__ import annotations

import argparse
import enum
import random
import sys
import types
from collections import UserDict, UserList, deque
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy
import torch
from torch import Generator, Tensor, nn

from partnets.utils.shards import local
from partnets.utils.tree_leaves import slots

# Objects of these packages are not part of a model's state: a LightningModule's trainer, for example, leads to
# everything.
LIBRARIES = {"accelerate", "lightning", "numpy", "pandas", "partkernels", "partnets", "torch", "transformers"}
# The dicts in which a module has its parts.
PARTS = "_parameters", "_buffers", "_modules"
PLAIN = bool, int, float, complex, str, bytes, types.NoneType
# Objects of Python's library that may keep state in attributes.
OBJECTS = types.SimpleNamespace, argparse.Namespace, UserDict, UserList
# The types of class attributes that are state.
STATE = *PLAIN, Tensor, list, dict, set, deque


class Snapshot:
    """A snapshot of a model: parameters, buffers, gradients, and the state of its modules and hooks.

    State is tensors, arrays, numbers, text and generators, in attributes, lists, tuples, dicts, sets, user-defined
    objects, and variables of functions such as hooks.

    Args:
        model: any module.
        without: dotted paths of parameters and buffers to leave out.

    Attributes:
        values: {dotted path: a copy of a tensor, or a plain value}.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(2))
        >>> before = Snapshot(model)
        >>> _ = model(torch.randn(4, 2))
        >>> before.changed(Snapshot(model))
        ['0.running_mean', '0.running_var', '0.num_batches_tracked']
        >>> before.put_back()
        >>> model[0].running_mean.tolist()
        [0.0, 0.0]
    """

    def __init__(self, model: nn.Module, without: Container[str] = ()) -> None:
        self.values: dict[str, Any] = {}
        self._without = without
        self._restore: list[Callable[[], object]] = []
        self._spoil: dict[str, Callable[[float], object]] = {}
        self._seen: dict[int, Any] = {}  # objects by their ids, which are unique while the objects are alive
        self._left: deque[tuple[str, Any]] = deque([("", model)])
        while self._left:
            self._take(*self._left.popleft())

    def changed(self, after: Snapshot) -> list[str]:
        """Return the paths of values that differ or are in only one of the snapshots, in order."""
        paths, missing = dict.fromkeys((*self.values, *after.values)), object()
        return [p for p in paths if not same(self.values.get(p, missing), after.values.get(p, missing))]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore everything in place."""
        for restore in self._restore:
            restore()

    def spoil(self, path: str, factor: float) -> None:
        """Turn a float, or all of a floating-point tensor, into factor * (value + 1), and integers into 1000 * value.

        Integers on other devices than the CPU are left unchanged, as indices out of range would end the process there.
        """
        if path in self._spoil:
            with torch.no_grad(), suppress(RuntimeError):  # such as for a layout that cannot be filled
                self._spoil[path](factor)

    def _take(self, path: str, value: Any) -> None:
        if isinstance(value, PLAIN):
            self.values[path] = value
            return
        if id(value) in self._seen:
            return
        if isinstance(value, nn.Module):
            self._take_module(path, value)
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._take_tensor(path, value)
        elif isinstance(value, numpy.ndarray):
            if value.flags.writeable and value.dtype.kind in "biufc":
                self._take_array(path, value)
        elif (generator := _generator(value)) is not None:
            self.values[path], restore = generator
            self._restore.append(restore)
        elif isinstance(value, dict):
            self._take_dict(path, value)
        elif isinstance(value, list | deque):
            kept = list(value)
            self._restore.append(lambda: (value.clear(), value.extend(kept)))
            self._take_parts(path, enumerate(kept), value.__setitem__)
        elif isinstance(value, set):
            kept = set(value)
            self._restore.append(lambda: (value.clear(), value.update(kept)))
            self.values[path] = frozenset(map(_name, kept))
        elif isinstance(value, tuple):
            self._take_parts(path, enumerate(value))
        elif isinstance(value, partial):
            self._take_parts(path, enumerate((value.func, *value.args, *value.keywords.values())))
        elif isinstance(value, types.MethodType):
            self._take(path, value.__self__)
        elif isinstance(value, types.FunctionType):
            self._take_function(path, value)
        elif _is_own(value):
            self._take_object(path, value)

    def _take_module(self, path: str, module: nn.Module) -> None:
        """Record a module and its submodules, their tensors first, so that these have the names that torch gives."""
        found = [(name, part) for name, part in module.named_modules(prefix=path) if id(part) not in self._seen]
        self._seen |= {id(part): part for _, part in found}
        for name, tensor in (*module.named_parameters(prefix=path), *module.named_buffers(prefix=path)):
            self._take(name, tensor)
        for name, part in found:
            self._take_object(name, part)

    def _take_object(self, path: str, of: Any) -> None:
        """Record an object's attributes, and those of its user-defined classes, such as a counter of all calls."""
        self._take_dict(path, getattr(of, "__dict__", {}))
        kept = {name: getattr(of, name) for name in slots(of)}
        self._take_attributes(path, kept, partial(object.__setattr__, of))  # also where setattr is refused
        for cls in type(of).__mro__:
            if not _is_of_library(cls) and id(cls) not in self._seen:
                self._seen[id(cls)] = cls
                own = {name: value for name, value in vars(cls).items() if not name.startswith("__")}
                kept = {name: value for name, value in own.items() if isinstance(value, STATE) or _is_own(value)}
                self._take_attributes(cls.__qualname__, kept, partial(setattr, cls))

    def _take_attributes(self, path: str, kept: dict[str, Any], put: Callable[[str, Any], object]) -> None:
        self._restore += [partial(put, name, value) for name, value in kept.items()]
        self._take_parts(path, kept.items(), put)

    def _take_array(self, path: str, array: numpy.ndarray) -> None:
        try:
            tensor = torch.from_numpy(array)  # in the same memory
        except (TypeError, ValueError):  # negative strides, another byte order or extended precision
            self.values[path] = array.tobytes()
            self._restore.append(partial(numpy.copyto, array, array.copy()))
        else:
            self._take_tensor(path, tensor)

    def _take_tensor(self, path: str, tensor: Tensor) -> None:
        if isinstance(tensor, nn.Parameter):
            hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
            self._left += [(_joined(path, "hooks"), one) for one in hooks if one]
        self._take_dict(_joined(path, "attributes"), vars(tensor))
        if path in self._without or tensor.is_meta or nn.parameter.is_lazy(tensor):
            return
        self.values[path] = kept = tensor.detach().clone()
        grad = tensor.grad if tensor.is_leaf else None

        def restore() -> None:
            if tensor.shape != kept.shape:
                tensor.data = kept.clone()
            elif not same(tensor.detach(), kept):
                tensor.detach().copy_(kept)
            if tensor.is_leaf:
                tensor.grad = grad

        self._restore.append(restore)
        if tensor.is_floating_point():
            self._spoil[path] = lambda factor: tensor.detach().add_(1).mul_(factor)
        elif tensor.device.type == "cpu":
            self._spoil[path] = lambda _: tensor.mul_(1000)

    def _take_dict(self, path: str, items: dict) -> None:
        kept = dict(items)

        def restore() -> None:
            if items.keys() != kept.keys() or any(items[key] is not kept[key] for key in kept):
                items.clear()
                items.update(kept)

        self._restore.append(restore)
        named = {key: value for key, value in kept.items() if key not in PARTS}
        self._take_parts(path, named.items(), items.__setitem__)
        for key in kept.keys() - named.keys():
            self._left.append((path, kept[key]))

    def _take_function(self, path: str, function: types.FunctionType) -> None:
        if _is_of_library(function):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # a variable that has not been set
                put = partial(setattr, cell, "cell_contents")
                self._restore.append(partial(put, cell.cell_contents))
                self._take_parts(path, [(name, cell.cell_contents)], lambda _, value, put=put: put(value))
        self._take_parts(path, [("__defaults__", function.__defaults__), ("__kwdefaults__", function.__kwdefaults__)])

    def _take_parts(
        self, path: str, parts: Iterable[tuple[Any, Any]], put: Callable[..., object] | None = None
    ) -> None:
        """Record named parts; `put` replaces one of them."""
        for name, part in parts:
            self._left.append((_joined(path, name), part))
            if put is not None and type(part) in (int, float):
                self._spoil[_joined(path, name)] = partial(_put_spoiled, put, name, part)


def _put_spoiled(put: Callable[..., object], name: Any, number: float, factor: float) -> None:
    put(name, factor * (number + 1) if type(number) is float else 1000 * number)


def _generator(value: Any) -> tuple[Any, Callable[[], object]] | None:
    """Return a generator's comparable state and a function that restores it; None if value is not a generator."""
    if isinstance(value, Generator):
        return value.get_state(), partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return value.getstate(), partial(value.setstate, value.getstate())
    if isinstance(value, numpy.random.RandomState):
        state = value.get_state(legacy=False)
        return repr(state), partial(value.set_state, state)
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return repr(bits.state), partial(setattr, bits, "state", bits.state)
    return None


def _is_own(value: Any) -> bool:
    """Return whether an object is one of the user's, not of a library, a class, a module of Python or an enum."""
    is_object = not isinstance(value, type | types.ModuleType | enum.Enum)
    return is_object and (isinstance(value, OBJECTS) or not _is_of_library(type(value)))


def _is_of_library(of: type | types.FunctionType) -> bool:
    return (of.__module__ or "").partition(".")[0] in LIBRARIES | sys.stdlib_module_names


def same(first: Any, second: Any) -> bool:
    """Return whether two values have the same type and, bit for bit, the same content.

    Example:
        >>> same(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan])), same(1, 1.0)
        (True, False)
    """
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        kinds = ((one.shape, one.dtype, one.device, one.layout) for one in (first, second))
        return next(kinds) == next(kinds) and all(map(torch.equal, _bits(first), _bits(second)))
    return type(first) is type(second) and (first == second or (first != first and second != second))


def _bits(tensor: Tensor) -> list[Tensor]:
    """Return bytes that distinguish tensors of the same shape, dtype and layout."""
    if tensor.is_nested:
        parts = list(tensor.unbind())
    elif tensor.is_quantized:
        parts = [tensor.int_repr(), tensor.dequantize()]
    elif tensor.layout == torch.strided:
        parts = [local(tensor)]
    else:
        sparse = tensor.to_sparse()
        parts = [sparse._indices(), sparse._values()]
    return [part.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for part in parts]


def _joined(path: str, name: Any) -> str:
    return f"{path}.{_name(name)}" if path else _name(name)


def _name(key: Any) -> str:
    """Return the name of a dict's key or a set's member; for tensors and modules, their type and address."""
    return f"{type(key).__name__} {id(key):#x}" if isinstance(key, Tensor | nn.Module) else str(key)
