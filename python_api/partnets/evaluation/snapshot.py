"""Snapshot: a snapshot of a module's state between two calls, which can be compared and restored."""

from __future__ import annotations

import argparse
import copy
import enum
import functools
import random
import sys
import types
from array import array
from collections import UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from partnets.utils.contained import slots

# Objects of these packages are not part of a model's state: a LightningModule's trainer, for example, leads to
# everything.
LIBRARIES = {"accelerate", "lightning", "numpy", "pandas", "partkernels", "partnets", "torch", "transformers"}
# The depth of the search, enough for an attribute of an attribute in a closure of a hook.
DEEPEST = 8
# The content of a closure's cell that has not been set.
EMPTY = object()


class Snapshot:
    """A snapshot of a model: parameters, buffers, gradients, and the state of its modules and hooks.

    State is tensors, numbers, text and arrays in attributes, lists, dicts, sets, user-defined objects and closures of
    hooks.

    Args:
        model: any module.
        without: dotted paths to leave out.
        known: an earlier snapshot, from which copies of unchanged tensors are reused.

    Attributes:
        values: {dotted path: a copy of a tensor or of an array, or a plain value}.

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

    def __init__(self, model: nn.Module, without: Container[str] = (), known: Snapshot | None = None) -> None:
        self._without = without
        self._known = {} if known is None else known.values
        self.values: dict[str, Any] = {}
        self._put_back: list[Callable[[], None]] = []
        self._spoil: dict[str, Callable[[float], object]] = {}
        self._seen: set[int] = set()
        self._classes: set[type] = set()
        self._alive: list[Any] = []  # keeps ids unique
        # Parts of the model are named by their paths in it, even if other objects refer to them.
        self._places: dict[int, set[str]] = defaultdict(set)
        for named in (model.named_modules, model.named_parameters, model.named_buffers):
            for name, part in named(remove_duplicate=False):
                self._places[id(part)].add(name)
        self._take("", model, 0)
        self._known = {}

    def changed(self, after: Snapshot) -> list[str]:
        """Return the paths of values that differ or are in only one of the snapshots, in order."""
        paths, missing = dict.fromkeys((*self.values, *after.values)), object()
        return [p for p in paths if not same(self.values.get(p, missing), after.values.get(p, missing))]

    def put_back(self) -> None:
        """Restore everything in place."""
        with torch.no_grad():
            failed = []
            for put_back in self._put_back:
                try:
                    put_back()
                except Exception as error:  # such as from a tensor subclass; still restore everything else
                    failed.append(error)
        if failed:
            raise failed[0]

    def spoil(self, path: str, factor: float) -> None:
        """Turn a float, or all of a floating-point tensor, into factor * (value + 1), and integers into 1000 * value.

        Integers on other devices than the CPU are left unchanged, as indices out of range would end the process there.
        """
        if path in self._spoil:
            with torch.no_grad(), suppress(RuntimeError):  # such as for a layout that cannot be filled
                self._spoil[path](factor)

    def _take(self, path: str, value: Any, depth: int) -> None:
        if path in self._without:
            self._take_hooks(path, value, depth)
            return
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            self.values[path] = value
            return
        if id(value) in self._seen or depth > DEEPEST or path not in self._places.get(id(value), {path}):
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if isinstance(value, Tensor):
            self._take_tensor(path, value)
            self._take_hooks(path, value, depth)
        elif (generator := _generator(value)) is not None:
            self.values[path], put_back = generator
            self._put_back.append(put_back)
        elif isinstance(value, nn.Module):
            self._take_dict(path, vars(value), 0)
            self._take_slots(path, value, 0)
        elif isinstance(value, bytearray | array):
            self.values[path], kept = bytes(value), value[:]
            self._put_back.append(lambda: value.__setitem__(slice(None), kept))
        elif type(value).__module__ == "numpy" and hasattr(value, "dtype"):
            self.values[path] = kept = value.copy()
            if hasattr(value, "fill"):
                self._put_back.append(lambda: value.__setitem__(..., kept))
        else:
            self._take_container(path, value, depth)

    def _take_tensor(self, path: str, tensor: Tensor) -> None:
        if tensor.is_meta or nn.parameter.is_lazy(tensor):
            return
        known = self._known.get(path)
        has_changed = not (isinstance(known, Tensor) and same(tensor.detach(), known))
        self.values[path] = kept = tensor.detach().clone() if has_changed else known
        grad = tensor.grad if tensor.is_leaf else None

        def put_back() -> None:
            if tensor.shape != kept.shape:
                tensor.data = kept
            elif not same(tensor.detach(), kept):
                tensor.detach().copy_(kept)
            if tensor.is_leaf:
                tensor.grad = grad

        self._put_back.append(put_back)
        if tensor.is_floating_point():
            self._spoil[path] = lambda factor: tensor.detach().add_(1).mul_(factor)
        elif tensor.device.type == "cpu":
            self._spoil[path] = lambda _: tensor.mul_(1000)

    def _take_hooks(self, path: str, value: Any, depth: int) -> None:
        """Record a tensor's attributes, and the state of the hooks of a parameter's gradient."""
        if type(value) in (Tensor, nn.Parameter):
            self._take_dict(path, vars(value), depth)
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks") if isinstance(value, nn.Parameter) else ():
            if hooks := getattr(value, name):
                self._take(_joined(path, name), hooks, depth + 1)

    def _take_dict(self, path: str, items: dict, depth: int) -> None:
        kept = dict(items)

        def put_back() -> None:
            if items.keys() != kept.keys() or any(items[key] is not kept[key] for key in kept):
                items.clear()
                items.update(kept)

        self._put_back.append(put_back)
        for key, value in kept.items():
            inside = key in ("_parameters", "_buffers", "_modules")
            self._take(path if inside else _joined(path, key), value, depth + 1)
            self._take_number(_joined(path, key), value, partial(items.__setitem__, key))

    def _take_number(self, path: str, value: Any, put: Callable[[float], object]) -> None:
        """Record how to spoil a number, which cannot be changed in place."""
        if type(value) in (int, float) and path not in self._without:
            self._spoil[path] = lambda factor: put(factor * (value + 1) if type(value) is float else 1000 * value)

    def _take_slots(self, path: str, value: Any, depth: int) -> None:
        """Record an object's slots, and attributes of its user-defined classes, such as a counter of all calls."""
        self._take_attributes(path, value, slots(value), depth)
        for cls in type(value).__mro__:
            if cls not in self._classes and not _is_of_library(cls):
                self._classes.add(cls)
                names = [name for name, part in vars(cls).items() if _is_state(name, part)]
                self._take_attributes(cls.__qualname__, cls, names, depth)

    def _take_attributes(self, path: str, of: Any, names: Iterable[str], depth: int) -> None:
        kept = {name: getattr(of, name) for name in names if hasattr(of, name)}

        def put_back() -> None:
            for name, part in kept.items():
                if getattr(of, name, EMPTY) is not part:
                    setattr(of, name, part)

        self._put_back.append(put_back)
        for name, part in kept.items():
            self._take(_joined(path, name), part, depth + 1)
            self._take_number(_joined(path, name), part, partial(setattr, of, name))

    def _take_container(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, dict):
            self._take_dict(path, value, depth)
            return
        if isinstance(value, list | deque):
            kept = list(value)
            self._put_back.append(lambda: (value.clear(), value.extend(kept)))
            for i, part in enumerate(kept):
                self._take_number(_joined(path, i), part, partial(value.__setitem__, i))
        elif isinstance(value, set):
            kept = set(value)
            self._put_back.append(lambda: (value.clear(), value.update(kept)))
            self.values[path] = frozenset((type(one).__name__, _key(one)) for one in kept)
        elif isinstance(value, types.FunctionType):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                if (kept := _content(cell)) is not EMPTY:
                    put = partial(setattr, cell, "cell_contents")
                    self._put_back.append(partial(put, kept))
                    self._take_number(_joined(path, name), kept, put)
        elif _is_ones_own(value):
            self._take_dict(path, getattr(value, "__dict__", {}), depth)
            self._take_slots(path, value, depth)
            return
        for name, part in _inside(value):
            self._take(_joined(path, name), part, depth + 1)


def _generator(value: Any) -> tuple[Any, Callable[[], None]] | None:
    """Return a generator's comparable state and a function that restores it; None if value is not a generator."""
    if isinstance(value, Generator):
        state = value.get_state()
        return state, lambda: value.set_state(state)
    if isinstance(value, random.Random):
        state = value.getstate()
        return state, lambda: value.setstate(state)
    if _package(type(value)) != "numpy":
        return None
    if hasattr(value, "bit_generator"):
        bits, state = value.bit_generator, copy.deepcopy(value.bit_generator.state)
        return repr(state), lambda: setattr(bits, "state", state)
    if hasattr(value, "get_state"):  # a RandomState
        state = value.get_state()
        return repr(state), lambda: value.set_state(state)
    return None


def _inside(value: Any) -> list[tuple[Any, Any]]:
    """Return the names and values in a sequence or a set, or in a function's closure and defaults."""
    if isinstance(value, list | tuple | deque | set):
        return list(enumerate(value))
    if isinstance(value, partial):
        return list(enumerate((value.func, *value.args, *value.keywords.values())))
    if isinstance(value, types.MethodType):
        return [("__self__", value.__self__)]
    if isinstance(value, types.FunctionType):
        if _package(value) in LIBRARIES:
            return []
        names = (*value.__code__.co_freevars, "__defaults__", "__kwdefaults__")
        values = (*map(_content, value.__closure__ or ()), value.__defaults__, value.__kwdefaults__)
        return [(name, part) for name, part in zip(names, values, strict=True) if part is not EMPTY]
    return []


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY


def _is_ones_own(value: Any) -> bool:
    has_attributes = hasattr(value, "__dict__") or slots(value)
    if not has_attributes or isinstance(value, type | types.ModuleType | enum.Enum):
        return False
    if isinstance(value, types.SimpleNamespace | argparse.Namespace | UserDict | UserList):
        return True
    return not _is_of_library(type(value))


def _is_state(name: str, value: Any) -> bool:
    """Return whether a class attribute is state: a number, a tensor, a container or a user-defined object."""
    plain = bool | int | float | complex | str | bytes | Tensor | list | dict | set | deque | bytearray | array
    return not name.startswith("__") and (isinstance(value, plain) or (_is_ones_own(value) and not callable(value)))


def _is_of_library(of: type | types.FunctionType) -> bool:
    """Return whether a class or a function belongs to the standard library or to one of LIBRARIES."""
    return _package(of) in LIBRARIES | sys.stdlib_module_names


def _package(of: type | types.FunctionType) -> str:
    """Return the top-level package of a class or a function."""
    return (of.__module__ or "").partition(".")[0]


def same(first: Any, second: Any) -> bool:
    """Return whether two values are bitwise equal; a NaN equals any NaN."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
            return False
        if first is second:
            return True
        pairs = zip(_plain(first), _plain(second), strict=False)
        return first.layout == second.layout and all(torch.equal(a, b) or _same_but_nan(a, b) for a, b in pairs)
    if hasattr(first, "tobytes") and hasattr(second, "tobytes"):
        return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()
    return type(first) is type(second) and (first == second or (first != first and second != second))


def _plain(tensor: Tensor) -> list[Tensor]:
    """Return strided tensors of comparable dtypes that distinguish tensors of the same shape and dtype."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.layout == torch.jagged:
        return [tensor.offsets(), tensor.values()]
    if tensor.is_quantized:
        return [tensor.int_repr(), tensor.dequantize()]
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout != torch.strided:  # an MKLDNN tensor
        return [tensor.to_dense()]
    return [tensor] if _is_compared(tensor.dtype) else [tensor.contiguous().view(torch.uint8)]


@functools.cache
def _is_compared(dtype: torch.dtype) -> bool:
    """Return whether torch can compare tensors of this dtype; it cannot for bits and the smallest floats."""
    try:
        return torch.equal(*(torch.empty(1, dtype=dtype, device="cpu") for _ in range(2))) or True
    except RuntimeError:  # includes NotImplementedError
        return False


def _same_but_nan(first: Tensor, second: Tensor) -> bool:
    if not (first.is_floating_point() or first.is_complex()):
        return False
    nan = first.isnan()
    return torch.equal(nan, second.isnan()) and torch.equal(first[~nan], second[~nan])


def _joined(path: str, name: Any) -> str:
    return f"{path}.{_key(name)}" if path else _key(name)


def _key(name: Any) -> str:
    """Return the name of a dict's key or a set's member; for tensors and modules, their type and address."""
    return f"{type(name).__name__} {id(name):#x}" if isinstance(name, Tensor | nn.Module) else str(name)
