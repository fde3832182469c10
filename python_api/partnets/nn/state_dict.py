"""state_dicts are loaded as a whole or not at all: torch itself loads what fits, and then raises for the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from partnets.nn.partitioned import Partitioned


def guard(model: nn.Module) -> None:
    """Makes model.load_state_dict raise before anything is copied if an entry does not fit where it belongs.

    Keys that are missing or unexpected do not count: whether they may be is up to the `strict` of that call, which
    torch tells nobody. It loads what is there, and then raises.

    Example:
        >>> import torch, partnets
        >>> model = partnets.partition(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), (0.5, 0.5))
        >>> state = model.state_dict() | {"0.bias": torch.ones(2, 2), "1.weight": torch.zeros(3, 3)}
        >>> model.load_state_dict(state)
        Traceback (most recent call last):
        RuntimeError: this state_dict does not fit the Sequential; load_state_dict has changed nothing:
          1.weight: has the shape [3, 3], and the model's [2, 2].
        >>> bool((model[0].bias == 1).all())
        False
    """
    model.register_load_state_dict_pre_hook(refuse_unfit)


def unguard(model: nn.Module) -> None:
    """Undoes `guard`, wherever it was called in a model."""
    for module in model.modules():
        hooks = module._load_state_dict_pre_hooks
        for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
            del hooks[key]


def refuse_unfit(module: nn.Module, state_dict: Mapping, prefix: str, *_) -> None:
    """Raises RuntimeError, which names every misfit, if an entry for a module or what is in it does not fit."""
    unfit, tied = [], defaultdict(list)
    for path, inner in module.named_modules(remove_duplicate=False):
        inside = f"{prefix}{path}." if path else prefix
        if loads_as_torch(inner, type(inner)):
            unfit += unfit_tensors(inner, state_dict, inside)
        elif isinstance(inner, Partitioned):
            unfit += inner.unfit(state_dict, inside)
            for name in getattr(inner, "partitions", ()):
                tied[inner._parameters.get(name)].append(f"{inside}{inner.partition_key(name)}")
    for keys in tied.values():
        if missing := [key for key in keys if key not in state_dict and any(other in state_dict for other in keys)]:
            there = next(key for key in keys if key in state_dict)
            unfit.append(
                f"{missing[0]}: is missing, and {there} is there; the weight that they share has one partition."
            )
    if unfit:
        listed = "\n".join(f"  {message}" for message in unfit)
        raise RuntimeError(
            f"this state_dict does not fit the {type(module).__name__}; load_state_dict has changed nothing:\n{listed}"
        )


def loads_as_torch(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Whether nothing renames or converts what a module of a class is given before torch compares it."""
    usual = cls._load_from_state_dict is nn.Module._load_from_state_dict
    return usual and all(_is_ours(hook) for hook in module._load_state_dict_pre_hooks.values())


def _is_ours(hook) -> bool:
    return getattr(hook, "hook", hook) is refuse_unfit  # torch wraps those that want to know their module


def unfit_tensors(module: nn.Module, state_dict: Mapping, prefix: str) -> list[str]:
    """What is wrong with the entries of a module's own parameters and buffers, those of its children left out."""
    messages = []
    for name, own in (*module._parameters.items(), *module._buffers.items()):
        key = prefix + name
        if own is None or is_lazy(own) or key not in state_dict or name in module._non_persistent_buffers_set:
            continue
        value = state_dict[key]
        if not torch.overrides.is_tensor_like(value):
            messages.append(f"{key}: is a {type(value).__name__}; it must be a tensor.")
        elif value.shape != own.shape and (own.dim(), *value.shape) != (0, 1):  # torch once saved scalars as [1]
            messages.append(f"{key}: has the shape {[*value.shape]}, and the model's {[*own.shape]}.")
    return messages
