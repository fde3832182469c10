"""Nested channels: subnetwork k is the first channels of each layer, and computes with nothing else.

All channels of modules that belong together, such as the outputs of a convolution, the norm after it and the inputs of
the next one, are partitioned in order: see channel_search. Inside of subnetwork k < C the modules have narrow
parameters, which are views of the whole ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from partnets.subnetworks.state import state_of

# Numbers of channels are multiples of the first of these that changes no share by more than half of the smallest one:
# vector instructions and tensor cores compute with 8 or 16 channels at once.
BLOCKS = (16, 8, 4, 2, 1)
MEASURES = ("channels", "weights")
# A module's channels are those that it returns, those that it takes, or a dimension of a parameter: (name, dimension).
OUT, IN = "outputs", "inputs"
Side = str | tuple[str, int]
Channels = dict[nn.Module, dict[Side, Tensor]]
# For each type of module and side: its tensors with their dimensions, and its attributes.
PLACES: dict[tuple[type[nn.Module], str], tuple[dict[str, int], tuple[str, ...]]] = {
    (nn.Linear, OUT): ({"weight": 0, "bias": 0}, ("out_features",)),
    (nn.Linear, IN): ({"weight": 1}, ("in_features",)),
    (_ConvNd, OUT): ({"weight": 0, "bias": 0}, ("out_channels",)),
    (_ConvNd, IN): ({"weight": 1}, ("in_channels",)),
    (_ConvTransposeNd, OUT): ({"weight": 1, "bias": 0}, ("out_channels",)),
    (_ConvTransposeNd, IN): ({"weight": 0}, ("in_channels",)),
    (nn.Embedding, OUT): ({"weight": 1}, ("embedding_dim",)),
    (_NormBase, OUT): ({"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0}, ("num_features",)),
    (nn.LayerNorm, OUT): ({"weight": 0, "bias": 0}, ("normalized_shape",)),
    (nn.GroupNorm, OUT): ({"weight": 0, "bias": 0}, ("num_channels", "num_groups")),
    (nn.PReLU, OUT): ({"weight": 0}, ("num_parameters",)),
}
DEPTHWISE = {"weight": 0, "bias": 0}, ("in_channels", "out_channels", "groups")
CONV1D = {OUT: ({"weight": 1, "bias": 0}, ("nf",)), IN: ({"weight": 0}, ("nx",))}  # of transformers


class Whole(Exception):
    """Channels cannot be partitioned; the message says why."""


@dataclass
class Narrow:
    """The part of a module that each subnetwork uses.

    Attributes:
        owners: for each parameter or buffer and dimension, the partition of each index: uint8 [size].
        attributes: values of attributes in subnetworks 1..C.
        inputs, outputs: the partition of each channel that the module takes or returns; None where all are active.
    """

    owners: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    attributes: dict[str, list[Any]] = field(default_factory=dict)
    inputs: Tensor | None = None
    outputs: Tensor | None = None

    def take(self, tensor: Tensor, name: str, k: int) -> Tensor:
        """Return the part of a tensor that subnetwork k computes with: a view where channels are the first ones."""
        for dim, owners in self.owners[name].items():
            index = active_of(owners, k)
            if not len(index) or int(index[-1]) == len(index) - 1:
                tensor = tensor.narrow(dim, 0, len(index))
            else:
                tensor = tensor.index_select(dim, index.to(tensor.device))
        return tensor

    def partition(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return the partition of each entry: the latest of those of its channels; uint8, of this shape."""
        ids = torch.ones(tuple(shape), dtype=torch.uint8, device="cpu")
        for dim, owners in self.owners[name].items():
            ids = torch.maximum(ids, owners.view([-1 if d == dim else 1 for d in range(len(shape))]))
        return ids


def widths(size: int, proportions: Sequence[float], measure: str = "channels") -> list[int]:
    """Return the number of active channels in each of subnetworks 1..C.

    Args:
        size: the number of channels of the layer.
        proportions: C numbers that sum to 1.
        measure: 'channels': of the channels. 'weights': of the weights of a layer whose inputs are partitioned too, so
            that subnetwork k has the square root of its share of both.

    Example:
        >>> widths(64, (0.8, 0.1, 0.1)), widths(64, (0.8, 0.1, 0.1), "weights")
        ([48, 56, 64], [56, 60, 64])
    """
    shares = list(itertools.accumulate(proportions))
    exact = [size * (math.sqrt(min(share, 1)) if measure == "weights" else min(share, 1)) for share in shares]
    least = min((b - a for a, b in itertools.pairwise([0, *exact]) if b > a), default=size) * (1 + 1e-9)
    for block in BLOCKS:
        ends = [min(block * round(end / block), size) for end in exact[:-1]] + [size]
        if block == 1 or all(abs(a - b) <= least / 2 for a, b in zip(ends, exact, strict=True)):
            break
    return [max(end, 1) if shares[0] > 0 else end for end in ends]


def active_of(owners: Tensor, k: int) -> Tensor:
    return (owners <= k).nonzero()[:, 0]


def is_conv1d(module: nn.Module) -> bool:
    names = (f"{cls.__module__}.{cls.__name__}" for cls in type(module).__mro__)
    return "transformers.pytorch_utils.Conv1D" in names


def gain_of(module: nn.Module) -> str | None:
    """Return the name of the only parameter of a module such as an RMSNorm, a number for each channel; or None."""
    names = [name for name, p in module._parameters.items() if p is not None]
    is_known = bool(module._modules) or isinstance(module, tuple(cls for cls, _ in PLACES))
    return names[0] if not is_known and len(names) == 1 and module._parameters[names[0]].dim() == 1 else None


def place_of(module: nn.Module, side: Side) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return a module's tensors with channels, with their dimensions, and its attributes; none of an unknown type."""
    if not isinstance(side, str):
        return dict([side]), ()
    if is_conv1d(module):
        return CONV1D[side]
    if getattr(module, "groups", 1) > 1:
        return DEPTHWISE
    if side == OUT and (gain := gain_of(module)) is not None:
        return {gain: 0}, ("normalized_shape",) if hasattr(module, "normalized_shape") else ()
    return next((place for cls in type(module).__mro__ if (place := PLACES.get((cls, side)))), ({}, ()))


def joined(model: nn.Module, groups: Iterable[Channels], num_partitions: int) -> dict[nn.Module, Narrow]:
    """Return how the modules of a model are narrowed by several groups of channels.

    Raises:
        Whole: a module cannot be narrowed like that, or two that share a parameter would narrow it in two ways.
    """
    channels: Channels = {}
    for group in groups:
        for module, sides in group.items():
            own = channels.setdefault(module, {})
            own.update({side: torch.maximum(own.get(side, owners), owners) for side, owners in sides.items()})
    made = {module: _narrow_of(module, sides, num_partitions) for module, sides in channels.items()}
    seen: dict[nn.Parameter, dict[int, list[int]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            dims = made[module].owners.get(name, {}) if module in made else {}
            dims = {dim: owners.tolist() for dim, owners in dims.items()}
            if parameter is not None and seen.setdefault(parameter, dims) != dims:
                raise Whole(f"the {name} of a {type(module).__name__} is shared with a module of other channels")
    return made


def _narrow_of(module: nn.Module, channels: Mapping[Side, Tensor], num_partitions: int) -> Narrow:
    made, kind, groups = Narrow(), type(module).__name__, getattr(module, "groups", 1)
    if groups > 1 and not groups == module.in_channels == module.out_channels:
        raise Whole(f"a {kind} has {groups} groups of channels")
    for side, owners in channels.items():
        dims, attributes = place_of(module, side)
        for name, dim in dims.items():
            if name in module._parameters or name in module._buffers:
                made.owners.setdefault(name, {})[dim] = owners
            elif getattr(module, name, None) is not None:
                raise Whole(f"the {name} of a {kind} is computed from other parameters")
        numbers: list[Any] = [int((owners <= k).sum()) for k in range(1, num_partitions + 1)]
        made.attributes |= dict.fromkeys(attributes, numbers)
        if "normalized_shape" in attributes:
            if tuple(module.normalized_shape) != (len(owners),):
                raise Whole(f"a {kind} normalises over several dimensions")
            made.attributes["normalized_shape"] = [(number,) for number in numbers]
        if "num_groups" in attributes:
            rows = owners.view(module.num_groups, -1)
            if (rows != rows[:, :1]).any():
                raise Whole(f"channels would be partitioned inside of a group of a {kind}")
            made.attributes["num_groups"] = [number // rows.shape[1] for number in numbers]
        if side == OUT:
            made.outputs = owners
        # A module without a place for inputs computes each channel by itself, or normalises over them.
        is_by_channel = groups > 1 or (not place_of(module, IN)[0] and not isinstance(module, nn.Embedding))
        if side == IN or (side == OUT and is_by_channel):
            made.inputs = owners
    return made


@contextmanager
def narrowed(narrow: Mapping[nn.Module, Narrow], k: int) -> Iterator[None]:
    """Narrow modules to subnetwork k in the context: their parameters are views of the active channels.

    Buffers, such as running statistics, are copies of the active channels; writes into them are lost.
    """
    before: dict[nn.Module, dict[str, Any]] = {}
    try:
        for module, one in narrow.items():
            before[module] = _replaced(module, one, k)
        yield
    finally:
        for module, own in before.items():
            _restore(module, own)


def narrow_to(module: nn.Module, k: int) -> None:
    """Give a module the parameters, statistics and attributes of subnetwork k; its own are kept in its state."""
    state = state_of(module)
    state.base = _replaced(module, state.narrow, k, state.is_gathered)


@torch.no_grad()
def widen(module: nn.Module, k: int) -> None:
    """Undo narrow_to(module, k); statistics that have followed batches are written back."""
    state = state_of(module)
    for name in state.base.keys() & module._buffers.keys():
        whole = state.base[name]
        whole[(state.narrow.owners[name][0] <= k).to(whole.device)] = module._buffers[name]
    _restore(module, state.base)
    state.base = {}


def _replaced(module: nn.Module, one: Narrow, k: int, is_gathered: bool = False) -> dict[str, Any]:
    """Narrow a module's parameters, buffers and attributes, and return its own ones."""
    before = {}
    for name in one.owners:
        own = module._parameters if name in module._parameters else module._buffers
        is_left = own is module._parameters and is_gathered  # fully_shard narrows it when it is gathered
        if own[name] is not None and not is_left:
            before[name] = own[name]
            part = one.take(own[name], name, k)
            own[name] = part if own is module._parameters else part.clone()
    for name, values in one.attributes.items():
        before[name] = vars(module)[name]
        vars(module)[name] = values[k - 1]
    return before


def _restore(module: nn.Module, before: Mapping[str, Any]) -> None:
    for name, value in before.items():
        own = (own for own in (module._parameters, module._buffers) if name in own)
        next(own, vars(module))[name] = value
