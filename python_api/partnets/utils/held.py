"""Held: what a module holds between two calls, read as plain values, and put back."""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

# Objects of these packages are no state of a model's: who looks into a LightningModule's trainer looks at everything.
LIBRARIES = {"accelerate", "lightning", "numpy", "pandas", "partkernels", "partnets", "torch", "transformers"}
# As deep as an attribute of an attribute in a closure of a hook.
DEEPEST = 8


class Held:
    """The state of a model at present: parameters, buffers, gradients, and whatever its modules and hooks keep.

    That is: tensors, numbers, text and arrays, in attributes, in lists, dicts, sets and objects of one's own, and in
    closures of hooks.

    Attributes:
        values: {dotted path: a copy of a tensor or of an array, or a plain value}.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(2))
        >>> before = Held(model)
        >>> _ = model(torch.randn(4, 2))
        >>> before.changed(Held(model))
        ['0.running_mean', '0.running_var', '0.num_batches_tracked']
        >>> before.put_back()
        >>> model[0].running_mean.tolist()
        [0.0, 0.0]
    """

    def __init__(self, model: nn.Module) -> None:
        self.values: dict[str, Any] = {}
        self._put_back: list[Callable[[], None]] = []
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # or an id could be given twice
        self._take("", model, 0)

    def changed(self, after: Held, ignored: Iterable[str] = ()) -> list[str]:
        """The paths of what differs, or is only in one of the two; in order, without those that are ignored."""
        paths = dict.fromkeys((*self.values, *after.values))
        missing = object()
        return [
            path
            for path in paths
            if path not in ignored and not same(self.values.get(path, missing), after.values.get(path, missing))
        ]

    def put_back(self) -> None:
        """Sets everything to what it was, in place."""
        with torch.no_grad():
            for put_back in self._put_back:
                put_back()

    def _take(self, path: str, value: Any, depth: int) -> None:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            self.values[path] = value
            return
        if id(value) in self._seen or depth > DEEPEST:
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if isinstance(value, Tensor):
            self._take_tensor(path, value)
        elif isinstance(value, Generator):
            self.values[path] = state = value.get_state()
            self._put_back.append(lambda: value.set_state(state))
        elif isinstance(value, nn.Module):
            self._take_dict(path, vars(value), 0)
        elif type(value).__module__ == "numpy" and hasattr(value, "dtype"):
            self.values[path] = copy = value.copy()
            if hasattr(value, "fill"):
                self._put_back.append(lambda: value.__setitem__(..., copy))
        else:
            self._take_container(path, value, depth)

    def _take_tensor(self, path: str, tensor: Tensor) -> None:
        if tensor.is_meta or nn.parameter.is_lazy(tensor):
            return
        self.values[path] = kept = tensor.detach().clone()
        grad = tensor.grad if tensor.is_leaf else None

        def put_back() -> None:
            if tensor.shape != kept.shape:
                tensor.data = kept
            elif not same(tensor.detach(), kept):
                tensor.detach().copy_(kept)
            if tensor.is_leaf:
                tensor.grad = grad

        self._put_back.append(put_back)

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

    def _take_container(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, dict):
            self._take_dict(path, value, depth)
        elif isinstance(value, list | deque):
            kept = list(value)
            self._put_back.append(lambda: (value.clear(), value.extend(kept)))
            self._take_all(path, kept, depth)
        elif isinstance(value, set):
            kept = set(value)
            self._put_back.append(lambda: (value.clear(), value.update(kept)))
            self.values[path] = frozenset(map(repr, kept))
        elif isinstance(value, tuple):
            self._take_all(path, value, depth)
        elif isinstance(value, partial):
            self._take_all(path, (value.func, *value.args, *value.keywords.values()), depth)
        elif isinstance(value, types.MethodType):
            self._take(path, value.__self__, depth + 1)
        elif isinstance(value, types.FunctionType):
            for name, cell in _cells(value):
                kept = cell.cell_contents
                self._put_back.append(lambda cell=cell, kept=kept: setattr(cell, "cell_contents", kept))
                self._take(_joined(path, name), kept, depth + 1)
        elif hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType) and _is_ones_own(value):
            self._take_dict(path, vars(value), depth)

    def _take_all(self, path: str, values: Iterable[Any], depth: int) -> None:
        for i, value in enumerate(values):
            self._take(_joined(path, i), value, depth + 1)


def _is_ones_own(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] not in LIBRARIES | sys.stdlib_module_names


def same(first: Any, second: Any) -> bool:
    """Whether two values are equal to the bit; a NaN equals itself."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
            return False
        return first is second or torch.equal(first, second) or _same_but_nan(first, second)
    if hasattr(first, "tobytes") and hasattr(second, "tobytes"):
        return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()
    return type(first) is type(second) and (first == second or (first != first and second != second))


def _same_but_nan(first: Tensor, second: Tensor) -> bool:
    if not (first.is_floating_point() or first.is_complex()):
        return False
    nan = first.isnan()
    return torch.equal(nan, second.isnan()) and torch.equal(first[~nan], second[~nan])


def _joined(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def _cells(function: types.FunctionType) -> Iterator[tuple[str, types.CellType]]:
    """What a function remembers by its names: closures' cells that are filled."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cell.cell_contents  # noqa: B018
        except ValueError:
            continue
        yield name, cell
