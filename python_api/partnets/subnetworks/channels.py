"""Nested channels: subnetwork k is the first channels of each layer, and computes with nothing else.

torch-pruning's dependency graph (Fang et al., CVPR 2023) finds which channels of which modules belong together, such as
the outputs of a convolution, the norm after it and the inputs of the next one. All channels of such a group are divided
in order. Inside of subnetwork k < C the modules have narrow parameters, which are views of the whole ones.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils._pytree import tree_leaves

from partnets.subnetworks.state import state_of
from partnets.utils.modules import device_of, evaluating, to_device
from partnets.utils.random_state import preserved

# Numbers of channels are multiples of the first of these that changes no share by more than half of the smallest one:
# vector instructions and tensor cores compute with 8 or 16 channels at once.
BLOCKS = (16, 8, 4, 2, 1)
MEASURES = ("units", "weights")


@dataclass
class Narrow:
    """How one module is narrowed.

    Attributes:
        owners: for each parameter or buffer and dimension, the partition of each index: uint8 [size].
        attributes: values of attributes in subnetworks 1..C.
    """

    owners: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    attributes: dict[str, list[Any]] = field(default_factory=dict)

    def index(self, name: str, k: int) -> list[tuple[int, slice | Tensor]]:
        """Return the dimensions of a tensor that subnetwork k narrows, and its indices there."""
        found = []
        for dim, owners in self.owners[name].items():
            active = owners <= k
            number = int(active.sum())
            is_first = bool(active[:number].all())
            found.append((dim, slice(number) if is_first else active.nonzero()[:, 0]))
        return found

    def take(self, tensor: Tensor, name: str, k: int) -> Tensor:
        """Return the part of a tensor that subnetwork k computes with: a view where channels are the first ones."""
        for dim, index in self.index(name, k):
            if isinstance(index, slice):
                tensor = tensor.narrow(dim, 0, index.stop)
            else:
                tensor = tensor.index_select(dim, index.to(tensor.device))
        return tensor

    def put(self, tensor: Tensor, name: str, k: int, part: Tensor) -> None:
        """Write a part back into a tensor."""
        index: list[slice | Tensor] = [slice(None)] * tensor.dim()
        for dim, one in self.index(name, k):  # statistics have one dimension
            index[dim] = one if isinstance(one, slice) else one.to(tensor.device)
        tensor[tuple(index)] = part

    def partition(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return the partition of each entry: the latest of those of its channels; uint8, of this shape."""
        ids = torch.ones(tuple(shape), dtype=torch.uint8, device="cpu")
        for dim, owners in self.owners[name].items():
            view = [1] * len(shape)
            view[dim] = -1
            ids = torch.maximum(ids, owners.view(view))
        return ids


def widths(size: int, proportions: Sequence[float], measure: str = "units") -> list[int]:
    """Return the numbers of channels that subnetworks 1..C have, of so many.

    Args:
        size: how many channels there are.
        proportions: C numbers that sum to 1.
        measure: 'units': of the channels. 'weights': of the weights of a layer whose inputs are divided too, so that
            subnetwork k has the square root of its share of both.

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


# For each type of module, of its outputs and its inputs: tensors with their dimension, and attributes.
_OUT, _IN = "outputs", "inputs"
_PLACES: dict[tuple[type[nn.Module], str], tuple[dict[str, int], tuple[str, ...]]] = {
    (nn.Linear, _OUT): ({"weight": 0, "bias": 0}, ("out_features",)),
    (nn.Linear, _IN): ({"weight": 1}, ("in_features",)),
    (_ConvNd, _OUT): ({"weight": 0, "bias": 0}, ("out_channels",)),
    (_ConvNd, _IN): ({"weight": 1}, ("in_channels",)),
    (_ConvTransposeNd, _OUT): ({"weight": 1, "bias": 0}, ("out_channels",)),
    (_ConvTransposeNd, _IN): ({"weight": 0}, ("in_channels",)),
    (nn.Embedding, _OUT): ({"weight": 1}, ("embedding_dim",)),
    (_NormBase, _OUT): ({"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0}, ("num_features",)),
    (nn.LayerNorm, _OUT): ({"weight": 0, "bias": 0}, ("normalized_shape",)),
    (nn.RMSNorm, _OUT): ({"weight": 0}, ("normalized_shape",)),
    (nn.GroupNorm, _OUT): ({"weight": 0, "bias": 0}, ("num_channels", "num_groups")),
    (nn.PReLU, _OUT): ({"weight": 0}, ("num_parameters",)),
}


class _Whole(Exception):
    """A group of channels cannot be divided; the message says why."""


def find_channels(
    model: nn.Module, example: Any, proportions: Sequence[float], measure: str = "units"
) -> dict[nn.Module, Narrow]:
    """Return how the modules of a dense model are narrowed, so that each subnetwork runs and gives outputs alike.

    Args:
        model: runs on the example; it is left unchanged.
        example: what the model is called with: a tensor, a tuple of its arguments, or a dict of them by name.
        proportions: C numbers that sum to 1.
        measure: see `widths`.

    Raises:
        ImportError: torch-pruning is not installed.
        ValueError: the model fails on the example, or no channels can be divided.
    """
    try:
        import torch_pruning
    except ImportError as error:
        raise ImportError("scheme='nested' needs torch-pruning: pip install torch-pruning.") from error
    example = to_device(example, device_of(model))
    with preserved(device_of(model)), evaluating(model), torch.enable_grad():
        try:
            expected = _shapes(_called(model, example))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Unwrapped parameters detected")  # _narrow leaves their groups whole
                graph = torch_pruning.DependencyGraph().build_dependency(model, example_inputs=example)
        except Exception as error:
            raise ValueError(
                f"the model fails with example: {type(error).__name__}: {error}. Pass what it takes: a tensor, a tuple"
                " of its arguments, or a dict of them by name."
            ) from error
        roots = [_ConvNd, nn.Linear, nn.Embedding]
        groups = []
        for group in graph.get_all_groups(ignored_layers=[], root_module_types=roots):
            try:
                groups.append(_narrow(graph, group, model, proportions, measure))
            except _Whole:
                continue
        count = len(proportions)

        def runs(chosen: Iterable[dict[nn.Module, Narrow]]) -> bool:
            made = joined(chosen)
            try:
                for k in range(1, count):
                    with torch.no_grad(), narrowed(made, k):
                        if _shapes(_called(model, example)) != expected:
                            return False
            except Exception:  # whatever a model's code does with other widths
                return False
            return True

        if not runs(groups):
            groups = [group for group in groups if runs([group])]
            while groups and not runs(groups):
                groups.pop()
    if not groups:
        raise ValueError(
            f"no channels of this {type(model).__name__} can be divided so that narrower subnetworks run on the"
            " example; use scheme='weight' or 'node'."
        )
    return joined(groups)


def _narrow(graph, group, model: nn.Module, proportions: Sequence[float], measure: str) -> dict[nn.Module, Narrow]:
    """Return how a group of channels that belong together narrows its modules."""
    size, made = len(group[0].idxs), {}
    ends = widths(size, proportions, measure)
    owners = torch.ones(size, dtype=torch.uint8)
    for end in ends[:-1]:
        owners[end:] += 1
    modules, has_inputs = set(model.modules()), False
    for item in group:
        module = item.dep.target.module
        is_out = graph.is_out_channel_pruning_fn(item.dep.handler)
        if isinstance(module, nn.Parameter):
            raise _Whole("parameters that modules do not own")
        if module not in modules:
            continue  # an operation without parameters
        if sorted(set(item.root_idxs)) != list(range(size)):
            raise _Whole("a module with some of the channels only")
        place = next((p for cls in type(module).__mro__ if (p := _PLACES.get((cls, _OUT if is_out else _IN)))), None)
        if place is None:
            raise _Whole(f"a {type(module).__name__}")
        positions = torch.ones(max(item.idxs) + 1, dtype=torch.uint8)
        positions[torch.tensor(item.idxs)] = owners[torch.tensor(item.root_idxs)]
        _add(made.setdefault(module, Narrow()), module, place, positions, len(proportions))
        has_inputs |= not is_out
    if not has_inputs:
        raise _Whole("the model's outputs")
    return made


def _add(
    narrow: Narrow, module: nn.Module, place: tuple[dict[str, int], tuple[str, ...]], owners: Tensor, count: int
) -> None:
    dims, attributes = place
    numbers = [int((owners <= k).sum()) for k in range(1, count + 1)]
    is_depthwise = getattr(module, "groups", 1) > 1
    if is_depthwise:
        if not module.groups == module.in_channels == module.out_channels:
            raise _Whole("a convolution in groups")
        dims, attributes = {"weight": 0, "bias": 0}, ("in_channels", "out_channels", "groups")
    for name, dim in dims.items():
        tensor = getattr(module, name, None)
        if tensor is None:
            continue
        if tensor.shape[dim] != len(owners):
            raise _Whole(f"a {type(module).__name__} with {tensor.shape[dim]} channels, of which {len(owners)} belong")
        narrow.owners.setdefault(name, {})[dim] = owners
    for name in attributes:
        values: list[Any] = numbers
        if name == "normalized_shape":
            if len(module.normalized_shape) != 1:
                raise _Whole("a norm over several dimensions")
            values = [(number,) for number in numbers]
        if name == "num_groups":
            each = module.num_channels // module.num_groups
            if any(number % each for number in numbers):
                raise _Whole("a GroupNorm across whose groups channels are divided")
            values = [number // each for number in numbers]
        narrow.attributes[name] = values


def joined(groups: Iterable[Mapping[nn.Module, Narrow]]) -> dict[nn.Module, Narrow]:
    """Return how modules are narrowed by several groups of channels."""
    found: dict[nn.Module, Narrow] = {}
    for group in groups:
        for module, narrow in group.items():
            own = found.setdefault(module, Narrow())
            for name, dims in narrow.owners.items():
                own.owners.setdefault(name, {}).update(dims)
            own.attributes.update(narrow.attributes)
    return found


@contextmanager
def narrowed(narrow: Mapping[nn.Module, Narrow], k: int) -> Iterator[None]:
    """Make modules those of subnetwork k in the context: parameters are parts of theirs, and attributes fit.

    Buffers, such as running statistics, are copies of parts; what is written into them is lost.
    """
    before = []
    try:
        for module, one in narrow.items():
            for name in one.owners:
                own = module._parameters if name in module._parameters else module._buffers
                before.append((own, name, own[name]))
                if own[name] is not None:
                    part = one.take(own[name], name, k)
                    own[name] = part if own is module._parameters else part.clone()
            for name, values in one.attributes.items():
                before.append((vars(module), name, vars(module)[name]))
                vars(module)[name] = values[k - 1]
        yield
    finally:
        for own, name, value in reversed(before):
            own[name] = value


def narrow_to(module: nn.Module, k: int) -> None:
    """Give a module the parameters, statistics and attributes of subnetwork k; its own are kept in its state."""
    state = state_of(module)
    for name in state.narrow.owners:
        own = module._parameters if name in module._parameters else module._buffers
        is_left = own is module._parameters and state.is_gathered  # fully_shard narrows it when it is gathered
        if own[name] is not None and not is_left:
            state.base[name] = own[name]
            part = state.narrow.take(own[name], name, k)
            own[name] = part if own is module._parameters else part.clone()
    for name, values in state.narrow.attributes.items():
        state.base[name] = vars(module)[name]
        vars(module)[name] = values[k - 1]


@torch.no_grad()
def widen(module: nn.Module) -> None:
    """Give a module its own parameters and attributes again; statistics that have followed batches are written back."""
    state = state_of(module)
    for name, value in state.base.items():
        if name in module._parameters:
            module._parameters[name] = value
        elif name in module._buffers:
            state.narrow.put(value, name, state.active, module._buffers[name])
            module._buffers[name] = value
        else:
            vars(module)[name] = value
    state.base = {}


def _called(model: nn.Module, example: Any) -> Any:
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def _shapes(output: Any) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
