"""Rules: how the parameters of each type of module are partitioned and initialised."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from partkernels import Normal, Uniform
from partnets.subnetworks.initial_values import Distribution


def is_vector(parameter: Tensor) -> bool:
    """Return whether a parameter is added or multiplied by broadcasting, such as a bias, a gain or a class token.

    Such a parameter has at most one dimension larger than 1, or its first one is 1, as position embeddings [1, n, d].

    Example:
        >>> [is_vector(torch.zeros(shape)) for shape in [(), (8,), (8, 1, 1), (1, 16, 8), (8, 16)]]
        [True, True, True, True, False]
    """
    return parameter.dim() == 0 or parameter.shape[0] == 1 or sum(n > 1 for n in parameter.shape) <= 1


def _no_distribution(module: nn.Module, name: str) -> Distribution | None:
    return None


def _outputs(module: nn.Module, name: str, weight: Tensor) -> Tensor:
    """Return the output that each entry depends on, where the first dimension counts outputs."""
    return torch.arange(weight.shape[0], device="cpu").view(-1, *[1] * (weight.dim() - 1))


@dataclass(frozen=True)
class Rule:
    """The partitioning of a type of module.

    Attributes:
        weights: names of parameters with entries in partitions, or prefixes of such names.
        scales: names of vectors that are multiplied, s_1 * ... * s_k.
        statistics: names of buffers that differ between subnetworks.
        distribution: distribution(module, name): the distribution in the module's initialisation of a parameter; None
            if it is not drawn.
        outputs: outputs(module, name, weight): the output that each entry of a weight contributes to, int64, broadcast
            to the weight's shape, for the scheme 'node'.
        refuses: refuses(module): the reason why a module of this type cannot be partitioned, or None.
        vectors: names of vectors that are added, b_1 + ... + b_k, or prefixes of such names. Parameters without a
            name here, such as those of a subclass, are added vectors if is_vector returns True, and otherwise weights.
        alike: alike(name): the name of the weight that has the same owners of outputs in the scheme 'node'.
    """

    weights: Sequence[str] = ()
    scales: Sequence[str] = ()
    statistics: Sequence[str] = ()
    distribution: Callable[[Any, str], Distribution | None] = _no_distribution
    outputs: Callable[[Any, str, Tensor], Tensor] = _outputs
    refuses: Callable[[Any], str | None] = lambda module: None
    vectors: Sequence[str] = ()
    alike: Callable[[str], str] = lambda name: name

    def knows(self, name: str) -> bool:
        """Return whether the rule names a parameter."""
        return name in self.scales or name.startswith((*self.weights, *self.vectors))

    def is_weight(self, name: str, parameter: Tensor) -> bool:
        """Return whether the entries of a parameter belong to partitions."""
        if self.knows(name):
            return name not in self.scales and name.startswith(tuple(self.weights))
        return not is_vector(parameter)

    def map_of(self, name: str) -> str:
        """Return the name of the weight that shares its map with this one, if their shapes agree; by default `name`."""
        return name


def _fan_in(module: nn.Module, name: str) -> Distribution:
    """Return torch's U(-1 / sqrt(fan_in), 1 / sqrt(fan_in)) of linear layers and convolutions, for weight and bias."""
    return functools.partial(Uniform, 1 / math.sqrt(max(module.weight[0].numel(), 1)))


def _bilinear(module: nn.Bilinear, name: str) -> Distribution:
    return functools.partial(Uniform, 1 / math.sqrt(module.in1_features))


def _table(module: nn.Module, name: str) -> Distribution:
    return functools.partial(Normal, 1.0)


def _attention(module: nn.MultiheadAttention, name: str) -> Distribution | None:
    if "weight" not in name:
        return None
    return functools.partial(Uniform, math.sqrt(6 / sum(module._parameters[name].shape)))  # xavier_uniform_


def _recurrent(module: nn.RNNBase, name: str) -> Distribution:
    return functools.partial(Uniform, 1 / math.sqrt(module.hidden_size))


def _recurrent_outputs(module: nn.RNNBase, name: str, weight: Tensor) -> Tensor:
    units = weight.shape[0] if name.startswith("weight_hr") else module.hidden_size
    return (torch.arange(weight.shape[0], device="cpu") % units)[:, None]


def _of_hidden_state(name: str) -> str:
    return name.replace("weight_ih", "weight_hh")


def _transposed_outputs(module: _ConvTransposeNd, name: str, weight: Tensor) -> Tensor:
    group = torch.arange(weight.shape[0], device="cpu") // (weight.shape[0] // module.groups)
    outputs = group[:, None] * weight.shape[1] + torch.arange(weight.shape[1], device="cpu")
    return outputs.view(*outputs.shape, *[1] * (weight.dim() - 2))


def _columns(module: nn.Module, name: str, weight: Tensor) -> Tensor:
    """Return the output that each entry depends on, where the second dimension counts outputs."""
    return torch.arange(weight.shape[1], device="cpu")[None]


def _refuse_table(module: nn.Module) -> str | None:
    asked = [name for name in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, name)]
    return f"with {', '.join(asked)}, which change the table or its gradient by whole rows" if asked else None


def _gpt2(module: nn.Module, name: str) -> Distribution | None:
    return functools.partial(Normal, 0.02) if name == "weight" else None


_layer = functools.partial(Rule, ("weight",), vectors=("bias",))
_norm = Rule(scales=("weight",), vectors=("bias",))
_table_rule = _layer(distribution=_table, outputs=_columns, refuses=_refuse_table)

RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: _layer(distribution=_fan_in),
    nn.Bilinear: _layer(distribution=_bilinear),
    _ConvNd: _layer(distribution=_fan_in),
    _ConvTransposeNd: _layer(distribution=_fan_in, outputs=_transposed_outputs),
    nn.Embedding: _table_rule,
    nn.EmbeddingBag: _table_rule,
    nn.MultiheadAttention: Rule(
        ("in_proj_weight", "q_proj", "k_proj", "v_proj"), distribution=_attention, vectors=("in_proj_bias", "bias")
    ),
    nn.RNNBase: _layer(distribution=_recurrent, outputs=_recurrent_outputs, alike=_of_hidden_state),
    nn.LayerNorm: _norm,
    nn.GroupNorm: _norm,
    nn.RMSNorm: _norm,
    _NormBase: Rule((), ("weight",), ("running_mean", "running_var", "num_batches_tracked"), vectors=("bias",)),
}

_POWER = "whose power iteration would carry data between chunks", "remove the spectral normalisation first", False
# Types of modules, or of their hooks, that are refused: why, the cure, and whether only if they have parameters.
REFUSED: dict[type[Any], tuple[str, str, bool]] = {
    _SpectralNorm: _POWER,
    SpectralNorm: _POWER,
    torch.fx.GraphModule: (
        "that torch.fx has made, with parameters of which its copies lose the partitions",
        "take the model that it was made of",
        True,
    ),
    torch.jit.ScriptModule: ("that is compiled code", "take the module that it was made of", True),
}

# Types of other libraries, by their names: their rules are looked up without an import.
FOREIGN: dict[str, Rule] = {
    "transformers.pytorch_utils.Conv1D": _layer(distribution=_gpt2, outputs=_columns),
}


def register(cls: type[nn.Module], rule: Rule) -> None:
    """Set the rule by which `partition` treats a type of module and its subclasses.

    Args:
        cls: a subclass of torch.nn.Module.
        rule: see Rule.

    Raises:
        TypeError: cls is not a type of module, or the rule is not a Rule.

    Example:
        >>> class Gain(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.gain = nn.Parameter(torch.ones(4))
        >>> register(Gain, Rule(scales=("gain",)))
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"register got {cls!r}; pass a subclass of torch.nn.Module.")
    if not isinstance(rule, Rule):
        raise TypeError(f"register got the rule {rule!r}; pass a partnets.Rule.")
    RULES[cls] = rule


def known_rule(cls: type[nn.Module]) -> Rule | None:
    """Return the rule of the nearest base class with a rule, or None."""
    for base in cls.__mro__:
        if base in RULES:
            return RULES[base]
        if (rule := FOREIGN.get(f"{base.__module__}.{base.__qualname__}")) is not None:
            return rule
    return None


def rule_of(cls: type[nn.Module]) -> Rule:
    """Return the rule of a type of module; by default, vectors are added, and other parameters are weights."""
    return known_rule(cls) or Rule()
