"""Rules: how the parameters of each type of module are partitioned."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


@dataclass(frozen=True)
class Rule:
    """How a type of module is partitioned.

    Attributes:
        scales: the names of vectors that are multiplied, s_1 * ... * s_k.
        statistics: the names of buffers that each subnetwork has of its own.
    """

    scales: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()


RULES: dict[type[nn.Module], Rule] = {
    nn.LayerNorm: Rule(scales=("weight",)),
    nn.GroupNorm: Rule(scales=("weight",)),
    nn.RMSNorm: Rule(scales=("weight",)),
    _NormBase: Rule(scales=("weight",), statistics=("running_mean", "running_var", "num_batches_tracked")),
}


def rule_of(cls: type[nn.Module]) -> Rule:
    """Return the rule of the nearest base class that has one, or the default rule."""
    return next((RULES[base] for base in cls.__mro__ if base in RULES), Rule())


def is_vector(parameter: Tensor) -> bool:
    """Return whether a parameter is added or multiplied by broadcasting, such as a bias, a gain or a class token."""
    return parameter.dim() == 0 or parameter.shape[0] == 1 or sum(n > 1 for n in parameter.shape) <= 1
