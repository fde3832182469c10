"""The layers: every PartitionedLayer of this library registers here as its class is made, with the layer it replaces.

partnets.partition, the table in docs/layers.md and the tests read this list.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from torch import nn

Rule = Callable[..., nn.Module]

# Layers of other libraries, and the module of ours that registers each; it is imported when such a layer is met.
FOREIGN = {
    "transformers.pytorch_utils.Conv1D": "partnets.nn.gpt2",
    "timm.layers.conv2d_same.Conv2dSame": "partnets.nn.timm_layers",
    "timm.layers.linear.Linear": "partnets.nn.timm_layers",
    "timm.layers.norm_act.BatchNormAct2d": "partnets.nn.timm_layers",
}

# By exact type: a subclass may read its weight in a way of its own.
_rules: dict[type[nn.Module], Rule] = {}


def register(layer_type: type[nn.Module], rule: Rule) -> None:
    """Tells `partition` what to make of a type of layer; subclasses of it need rules of their own.

    Args:
        layer_type: a subclass of torch.nn.Module.
        rule: rule(layer, proportions, *, seed, defaults, scheme) -> Module, as Linear.from_ordinary is: a new module
            (or the layer itself, if it can stay), without changing the layer. seed is the layer's own.

    Raises:
        TypeError: layer_type is no type of module.

    Example:
        >>> import partnets
        >>> class MyLinear(nn.Linear):
        ...     pass
        >>> register(MyLinear, partnets.Linear.from_ordinary)
        >>> partnets.partition(nn.Sequential(MyLinear(4, 3)), (0.5, 0.5))[0]
        Linear(in_features=4, out_features=3, bias=True, partitions=[6, 6])
    """
    if not (isinstance(layer_type, type) and issubclass(layer_type, nn.Module)):
        raise TypeError(f"register got {layer_type!r}; pass a subclass of torch.nn.Module.")
    _rules[layer_type] = rule


def rule_of(layer_type: type[nn.Module]) -> Rule | None:
    """What `partition` makes of this type of layer, or None."""
    home = FOREIGN.get(f"{layer_type.__module__}.{layer_type.__qualname__}")
    if home is not None and layer_type not in _rules:
        importlib.import_module(home)
    return _rules.get(layer_type)


def known() -> list[type[nn.Module]]:
    """The types of layers that have a rule, in the order in which they were registered."""
    return list(_rules)
