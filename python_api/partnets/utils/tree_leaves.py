"""The leaves of a model's inputs and outputs, in any containers and objects."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# The depth of the search: deeper than a tensor in a distribution in a tuple in a dataclass, but finite, as objects may
# refer to a whole program.
DEEPEST = 8
# Iterators, such as generators, compute their elements on demand.
NOTHING = (
    *(nn.Module, str, bytes, int, float, complex, type, torch.dtype, torch.device, types.FunctionType, type(None)),
    *(torch.Size, Iterator),
)


def tensors(value: Any) -> list[Tensor]:
    """Return all tensors in a value, in containers of any kind and in attributes of objects."""
    return list(_tensors(value, set(), 0))


def _tensors(value: Any, seen: set[int], depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif not (isinstance(value, NOTHING) or type(value).__module__ == "numpy" or depth > DEEPEST or id(value) in seen):
        seen.add(id(value))
        for part in parts(value):
            yield from _tensors(part, seen, depth + 1)
        seen.discard(id(value))


def content(value: Any, depth: int = 0) -> list[Tensor]:
    """Return the tensors, arrays and numbers in a value, and how many parts each container has; no caches of keys."""
    if isinstance(value, Tensor):
        return [value]
    if type(value).__module__ == "numpy" or isinstance(value, bool | int | float | complex):
        return [torch.as_tensor(value, device="cpu")]
    is_cache = any(cls.__name__ == "Cache" for cls in type(value).__mro__)  # of transformers
    if isinstance(value, NOTHING) or depth > DEEPEST or is_cache:
        return []
    found = parts(value)
    return [torch.tensor(len(found), device="cpu"), *(one for part in found for one in content(part, depth + 1))]


def parts(value: Any) -> list[Any]:
    """Return the elements of a container, or the attributes of an object, including slots."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, Collection):
        return list(value)
    return list(({name: getattr(value, name) for name in slots(value)} | getattr(value, "__dict__", {})).values())


def slots(value: Any) -> list[str]:
    """Return the names of an object's slots that have values, from all of its classes."""
    found = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    names = [name for one in found for name in ((one,) if isinstance(one, str) else one)]
    return [name for name in names if name not in ("__dict__", "__weakref__") and hasattr(value, name)]
