"""Search for tensors in a model's inputs and outputs, in any containers and objects."""

from __future__ import annotations

import re
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# The depth of the search: deeper than a tensor in a distribution in a tuple in a dataclass, but finite, as objects may
# refer to a whole program.
DEEPEST = 8
NOTHING = nn.Module, str, bytes, complex, type, torch.dtype, torch.device, types.FunctionType, type(None)


def tensors(value: Any, *, caches: bool = True) -> list[Tensor]:
    """Return all tensors in a value, in containers of any kind and in attributes of objects.

    Args:
        caches: whether to include a model's key-value caches: attributes and keys that are `cache`, end with `_cache`
            or begin with `past_key` or `cache_params`, and objects of classes named ...Cache.

    Example:
        >>> from collections import deque
        >>> from types import SimpleNamespace
        >>> one, value = torch.ones(1), {"a": deque([torch.ones(1)])}
        >>> value["b"] = SimpleNamespace(kv_cache=one, logits={one})
        >>> len(tensors(value)), len(tensors(value, caches=False))
        (3, 2)
    """
    return [leaf for leaf in _leaves(value, set(), 0, caches) if isinstance(leaf, Tensor)]


def has_numbers(value: Any) -> bool:
    """Return whether a value contains Python's or NumPy's numbers; those in torch's objects do not count.

    Example:
        >>> has_numbers([torch.ones(1), None]), has_numbers([torch.ones(1), 0.5])
        (False, True)
    """
    leaves = list(_leaves(value, set(), 0, caches=False))
    return any(isinstance(leaf, int | float) or type(leaf).__module__ == "numpy" for leaf in leaves)


def is_lazy(value: Any) -> bool:
    """Return whether a value is an iterator, such as a generator, that computes its elements on demand.

    Example:
        >>> is_lazy(x for x in "ab"), is_lazy(["a"])
        (True, False)
    """
    return isinstance(value, Iterator)


def _leaves(value: Any, seen: set[int], depth: int, caches: bool) -> Iterator[Any]:
    """Yield tensors, numbers and arrays."""
    if isinstance(value, Tensor | int | float) or type(value).__module__ == "numpy":
        yield value
        return
    if isinstance(value, NOTHING) or depth > DEEPEST or id(value) in seen or is_lazy(value):
        return
    seen.add(id(value))
    for part in _parts(value, caches):
        yield from _leaves(part, seen, depth + 1, caches)
    seen.discard(id(value))


def _parts(value: Any, caches: bool) -> list[Any]:
    if not caches and type(value).__name__.endswith("Cache"):
        return []
    if isinstance(value, Collection) and not isinstance(value, Mapping):
        return list(value)
    named = value if isinstance(value, Mapping) else attributes(value)
    parts = [part for name, part in named.items() if caches or not CACHE.fullmatch(str(name))]
    if type(value).__module__.partition(".")[0] != "torch":
        return parts
    return [part for part in parts if not isinstance(part, int | float | torch.Size)]


# Names under which models keep and return keys and values.
CACHE = re.compile(r"past_key.*|cache_params.*|(.*_)?cache")


def attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes by name, including slots.

    Example:
        >>> import dataclasses
        >>> @dataclasses.dataclass(slots=True)
        ... class Output:
        ...     logits: int
        >>> attributes(Output(3))
        {'logits': 3}
    """
    found = {name: getattr(value, name) for name in slots(value) if hasattr(value, name)}
    return found | dict(getattr(value, "__dict__", {}))


def slots(value: Any) -> list[str]:
    """Return the names of an object's slots, from all of its classes."""
    found = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    names = [name for one in found for name in ((one,) if isinstance(one, str) else one)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]
