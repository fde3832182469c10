"""copied: copies of a module's state that share its trainable parameters."""

from __future__ import annotations

import copy
import random
import types
from array import array
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from partnets.utils.contained import attributes
from partnets.utils.held import is_ones_own
from partnets.utils.modules import learns


def copied(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Return a deep copy of tensors, arrays, generators, containers, modules and user-defined objects.

    Parameters that require a gradient, modules that have such parameters, functions and objects of libraries are
    shared, not copied. Copied tensors keep their autograd graph.

    Example:
        >>> layer, mean = nn.Linear(2, 2), torch.zeros(2)
        >>> kept = {"layers": [layer], "mean": mean, "again": mean}
        >>> other = copied(kept)
        >>> other["layers"][0] is layer, other["mean"] is mean, other["mean"] is other["again"]
        (True, False, True)
    """
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)][0]

    def remember(new: Any) -> Any:
        memo[id(value)] = new, value  # keeps value alive and its id unique
        return new

    if isinstance(value, Tensor):
        return remember(_tensor(value))
    if isinstance(value, torch.Generator):
        return remember(torch.Generator(value.device).set_state(value.get_state()))
    if type(value).__module__.partition(".")[0] == "numpy" or isinstance(value, random.Random):
        return remember(copy.deepcopy(value))
    if isinstance(value, str | bytes | int | float | complex):
        return value
    if isinstance(value, types.MethodType):
        return remember(types.MethodType(value.__func__, copied(value.__self__, memo)))
    if isinstance(value, tuple):
        parts = [copied(part, memo) for part in value]
        return remember(type(value)._make(parts) if hasattr(value, "_make") else type(value)(parts))
    if isinstance(value, dict | list | set | deque):
        new = remember(copy.copy(value))
        new.clear()
        if isinstance(value, dict):
            new.update({key: copied(part, memo) for key, part in value.items()})
        else:
            (new.update if isinstance(value, set) else new.extend)([copied(part, memo) for part in value])
        return new
    if isinstance(value, nn.Module):
        if learns(value):
            return value
        new = remember(object.__new__(type(value)))
        vars(new).update({name: copied(part, memo) for name, part in vars(value).items()})
        return new
    if isinstance(value, bytearray | array):
        return remember(value[:])
    if is_ones_own(value):
        new = remember(copy.copy(value))
        own = getattr(new, "__dict__", {})
        for name, part in attributes(value).items():
            if name in own:
                own[name] = copied(part, memo)
            else:
                setattr(new, name, copied(part, memo))
        return new
    return value


def _tensor(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return tensor if tensor.requires_grad else nn.Parameter(tensor.detach().clone(), requires_grad=False)
    if tensor.is_leaf:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return tensor.clone()
