"""replace_modules: other modules in the places of a model's."""

from __future__ import annotations

from typing import Any

from torch import nn


def replace_modules(model: nn.Module, new: dict[nn.Module, nn.Module]) -> nn.Module:
    """The model with each module of `new` replaced, under every path that it has, also inside of what replaces one.

    So are those that a module keeps in plain lists, tuples and dicts beside its attributes: its forward may go through.
    """
    for root in (model, *new.values()):
        for module in list(root.modules()):
            children = dict(module._modules.items())
            is_wrapped = children.get("_orig_mod") in new  # by torch.compile, which keeps its call too
            for name, child in children.items():
                if child in new:
                    module._modules[name] = new[child]
            if is_wrapped:
                module._initialize()
            for name, value in list(vars(module).items()):
                if name not in ("_modules", "_parameters", "_buffers"):
                    vars(module)[name] = _replaced(value, new, [])
    return new.get(model, model)


def _replaced(kept: Any, new: dict[nn.Module, nn.Module], around: list[Any]) -> Any:
    """A container with modules replaced, however deep; a list or a dict in place, for others may hold it too."""
    if isinstance(kept, nn.Module):
        return new.get(kept, kept)
    if not isinstance(kept, list | tuple | dict) or any(kept is one for one in around):
        return kept
    pairs = list(kept.items() if isinstance(kept, dict) else enumerate(kept))
    found = {key: _replaced(value, new, [*around, kept]) for key, value in pairs}
    changed = {key: found[key] for key, value in pairs if found[key] is not value}
    if changed and isinstance(kept, tuple):
        return getattr(type(kept), "_make", type(kept))(found.values())  # a namedtuple's
    for key, value in changed.items():
        kept[key] = value
    return kept
