"""Nested channels: subnetwork k is the first channels of each layer, and computes with nothing else.

torch-pruning's dependency graph (Fang et al., CVPR 2023) proposes which channels of which modules belong together, such
as the outputs of a convolution, the norm after it and the inputs of the next one. Each proposal is tried on the example
before it is accepted: see _Trials. All channels of such a group are divided in order. Inside of subnetwork k < C the
modules have narrow parameters, which are views of the whole ones.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from partnets.hyper import penalties
from partnets.subnetworks.state import state_of
from partnets.utils.contained import DEEPEST, NOTHING, parts, tensors
from partnets.utils.eager import eagerly
from partnets.utils.modules import device_of, hooked, to_device
from partnets.utils.random_state import preserved, seed

# Numbers of channels are multiples of the first of these that changes no share by more than half of the smallest one:
# vector instructions and tensor cores compute with 8 or 16 channels at once.
BLOCKS = (16, 8, 4, 2, 1)
MEASURES = ("units", "weights")
# Where channels cannot be divided anywhere: as 2 or 3 tensors beside each other, or in heads of so many channels.
BESIDE, HEADS = (2, 3), (8, 16, 32, 64, 128)


@dataclass
class Narrow:
    """How one module is narrowed.

    Attributes:
        owners: for each parameter or buffer and dimension, the partition of each index: uint8 [size].
        attributes: values of attributes in subnetworks 1..C.
        inputs, outputs: the partition of each channel that the module takes or returns; None where all are active.
    """

    owners: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    attributes: dict[str, list[Any]] = field(default_factory=dict)
    inputs: Tensor | None = None
    outputs: Tensor | None = None

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
OUT, IN = "outputs", "inputs"
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
# Of transformers, which keeps the weight transposed.
CONV1D = {OUT: ({"weight": 1, "bias": 0}, ("nf",)), IN: ({"weight": 0}, ("nx",))}
ROOTS = (_ConvNd, nn.Linear, nn.Embedding)
# A module's channels by OUT, IN, or the name of a parameter of its own and the dimension.
Channels = dict[nn.Module, dict[Any, Tensor]]


class _Whole(Exception):
    """Channels cannot be divided; the message says why."""


def _is_conv1d(cls: type) -> bool:
    return any((one.__module__, one.__name__) == ("transformers.pytorch_utils", "Conv1D") for one in cls.__mro__)


def _gain(module: nn.Module) -> str | None:
    """Return the name of the only parameter of a module such as an RMSNorm, a number for each channel; or None."""
    names = [name for name, p in module._parameters.items() if p is not None]
    is_one = len(names) == 1 and not module._modules and not isinstance(module, tuple(cls for cls, _ in PLACES))
    return names[0] if is_one and module._parameters[names[0]].dim() == 1 else None


def _place(module: nn.Module, side: str) -> tuple[dict[str, int], tuple[str, ...]] | None:
    if _is_conv1d(type(module)):
        return CONV1D[side]
    if side == OUT and (gain := _gain(module)) is not None:
        return {gain: 0}, ("normalized_shape",) if hasattr(module, "normalized_shape") else ()
    return next((place for cls in type(module).__mro__ if (place := PLACES.get((cls, side)))), None)


def _narrow(module: nn.Module, channels: Mapping[Any, Tensor], count: int) -> Narrow:
    """Return how these channels narrow a module.

    Raises:
        _Whole: such a module cannot be narrowed like that.
    """
    made = Narrow()
    for side, owners in channels.items():
        if not isinstance(side, str):
            name, dim = side
            made.owners.setdefault(name, {})[dim] = owners
            continue
        dims, attributes = _place(module, side)
        if getattr(module, "groups", 1) > 1:
            if not module.groups == module.in_channels == module.out_channels:
                raise _Whole("a convolution in groups")
            dims, attributes = {"weight": 0, "bias": 0}, ("in_channels", "out_channels", "groups")
        for name, dim in dims.items():
            tensor = module._parameters.get(name, module._buffers.get(name))
            if tensor is None and getattr(module, name, None) is not None:
                raise _Whole(f"a {type(module).__name__} whose {name} is computed from other parameters")
            if tensor is not None:
                made.owners.setdefault(name, {})[dim] = owners
        numbers = [int((owners <= k).sum()) for k in range(1, count + 1)]
        for name in attributes:
            values: list[Any] = numbers
            if name == "normalized_shape":
                if tuple(module.normalized_shape) != (len(owners),):
                    raise _Whole("a norm over several dimensions")
                values = [(number,) for number in numbers]
            if name == "num_groups":
                rows = owners.view(module.num_groups, -1)
                if (rows != rows[:, :1]).any():
                    raise _Whole("a GroupNorm across whose groups channels are divided")
                values = [number // rows.shape[1] for number in numbers]
            made.attributes[name] = values
        # A module without a place for inputs computes each channel by itself, or normalises over them.
        is_by_channel = "groups" in made.attributes or _place(module, IN) is None
        if side == OUT:
            made.outputs = owners
        if side == IN or (is_by_channel and not isinstance(module, nn.Embedding)):
            made.inputs = owners
    return made


def joined(model: nn.Module, groups: Iterable[Channels], count: int) -> dict[nn.Module, Narrow]:
    """Return how the modules of a model are narrowed by several groups of channels.

    Raises:
        _Whole: two modules that share a parameter would narrow it in two ways.
    """
    channels: Channels = {}
    for group in groups:
        for module, sides in group.items():
            own = channels.setdefault(module, {})
            for side, owners in sides.items():
                own[side] = torch.maximum(own[side], owners) if side in own else owners
    made = {module: _narrow(module, sides, count) for module, sides in channels.items()}
    seen: dict[int, dict[int, Tensor]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            dims = made[module].owners.get(name, {}) if module in made else {}
            first = seen.setdefault(id(parameter), dims)
            if parameter is not None and (
                first.keys() != dims.keys() or not all(torch.equal(first[dim], dims[dim]) for dim in dims)
            ):
                raise _Whole("a parameter that is shared")
    return made


def find_channels(
    model: nn.Module,
    example: Any,
    proportions: Sequence[float],
    measure: str = "units",
    among: Collection[nn.Module] | None = None,
) -> dict[nn.Module, Narrow]:
    """Return how the modules of a dense model are narrowed, so that each subnetwork runs and gives outputs alike.

    Args:
        model: runs on the example; it is left unchanged.
        example: what the model is called with: a tensor, a tuple of its arguments, or a dict of them by name.
        proportions: C numbers that sum to 1.
        measure: see `widths`.
        among: the modules that may be narrowed; all if None.

    Raises:
        ImportError: torch-pruning is not installed.
        ValueError: the model fails on the example, or no channels can be divided.
    """
    try:
        import torch_pruning
    except ImportError as error:
        raise ImportError(
            "scheme='nested' needs torch-pruning; install it by pip install 'torch-pruning>=1.6'."
        ) from error
    among = set(model.modules() if among is None else among)
    count, device = len(proportions), device_of(model)
    with preserved(device), eagerly():
        trials = _Trials(model, to_device(example, device), count)
        groups = [
            alternatives
            for group in _traced(torch_pruning, trials)
            if (alternatives := _alternatives(model, group, among, proportions, measure))
        ]
        chosen = _accepted(trials, groups, [])
    if not chosen:
        raise ValueError(
            f"no channels of this {type(model).__name__} can be divided so that narrower subnetworks run on the"
            " example and leave the others out; use scheme='weight' or 'node'."
        )
    return joined(model, chosen, count)


def _traced(torch_pruning, trials: _Trials) -> list[list[tuple]]:
    """Return groups of channels: module, side, indices there and those of the group's first module."""
    model, copies = trials.copied()
    originals = {new: module for module, new in copies.items()}
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for new, module in originals.items():
        for name, parameter in new._parameters.items():
            places.setdefault(id(parameter), []).append((module, name))
    conv1d = {type(module) for module in originals if _is_conv1d(type(module))}

    class Transposed(torch_pruning.pruner.function.LinearPruner):
        def get_out_channels(self, layer: nn.Module) -> int:
            return layer.weight.shape[1]

        def get_in_channels(self, layer: nn.Module) -> int:
            return layer.weight.shape[0]

    class Graph(torch_pruning.DependencyGraph):
        def _trace(self, *args, **options) -> dict:
            nodes = super()._trace(*args, **options)
            for node in nodes.values():
                is_of_channels = _is_of_channels(node.grad_fn)
                if is_of_channels is False:
                    node.type = torch_pruning.ops.OPTYPE.ELEMENTWISE  # which channels it takes is not followed
                node.enable_index_mapping |= bool(is_of_channels)  # torch-pruning forbids it for parameters [C, 1, 1]
            return nodes

    graph = Graph()
    found = []
    try:
        with torch.enable_grad():
            graph.build_dependency(
                model.eval(),
                trials.example,
                forward_fn=trials.roots,
                customized_pruners={cls: Transposed() for cls in conv1d},
                verbose=False,
            )
        groups = list(graph.get_all_groups(ignored_layers=[], root_module_types=[*ROOTS, *conv1d]))
    except Exception as error:
        raise ValueError(
            f"torch-pruning cannot follow this {type(model).__name__}: {type(error).__name__}: {error}; use"
            " scheme='weight' or 'node'."
        ) from error
    for group in groups:
        entries = []
        for item in group:
            node, indices = item.dep.target, (item.idxs, item.root_idxs)
            if isinstance(node.module, nn.Parameter):
                entries += [(module, (name, node.pruning_dim), *indices) for module, name in places[id(node.module)]]
            elif node.module in originals:  # and no operation without parameters
                side = OUT if graph.is_out_channel_pruning_fn(item.dep.handler) else IN
                entries.append((originals[node.module], side, *indices))
        found.append(entries)
    for node in graph.module2node.values():  # nodes refer to each other, and would keep tensors alive
        vars(node).clear()
    return found


def _is_of_channels(grad_fn) -> bool | None:
    """Return whether a step joins or divides tensors by a CNN's channels; None if they have fewer dimensions."""
    dim, is_torch = getattr(grad_fn, "_saved_dim", None), hasattr(grad_fn, "_input_metadata")
    dims = len(grad_fn._input_metadata[0].shape) if is_torch and isinstance(dim, int) else 0
    return (dim - (dim >> 63 << 64)) % dims == 1 if dims > 3 else None


def _alternatives(
    model: nn.Module, group: list[tuple], among: Collection[nn.Module], proportions: Sequence[float], measure: str
) -> list[Channels]:
    """Return how a group of channels that belong together may be divided, from the best to the last resort."""
    size, modules = len(group[0][2]), {module for module, *_ in group}
    if not any(side != OUT for _, side, *_ in group) or not modules <= among:
        return []  # the model's outputs, or a part that stays as it is
    of_groups = math.lcm(*(one.num_channels // one.num_groups for one in modules if isinstance(one, nn.GroupNorm)))
    found, seen = [], set()
    for beside, block in [(1, 1), (1, of_groups), *((n, 1) for n in BESIDE), *((1, n) for n in HEADS)]:
        if size % (beside * block) or size // (beside * block) < 2:
            continue
        owners = torch.ones(size // (beside * block), dtype=torch.uint8, device="cpu")
        for end in widths(len(owners), proportions, measure)[:-1]:
            owners[end:] += 1
        owners = owners.repeat_interleave(block).repeat(beside)
        if tuple(owners.tolist()) in seen:
            continue
        seen.add(tuple(owners.tolist()))
        channels: Channels = {}
        try:
            for module, side, indices, roots in group:
                _add(channels.setdefault(module, {}), module, side, indices, owners[torch.tensor(roots)])
            joined(model, [{module: sides for module, sides in channels.items() if sides}], len(proportions))
        except (_Whole, TypeError, IndexError):  # torch-pruning gives no root to some indices
            continue
        found.append({module: sides for module, sides in channels.items() if sides})
    return found


def _add(sides: dict[Any, Tensor], module: nn.Module, side: Any, indices: list[int], owners: Tensor) -> None:
    """Note who owns some channels of a module; others belong to partition 1."""
    if isinstance(module, nn.PReLU) and module.num_parameters == 1:
        return
    if not isinstance(side, str) and side[0] == _gain(module):
        side = OUT
    place = ({side[0]: side[1]}, ()) if not isinstance(side, str) else _place(module, side)
    if place is None:
        raise _Whole(f"a {type(module).__name__}")
    sizes = {tensor.shape[dim] for name, dim in place[0].items() if (tensor := getattr(module, name, None)) is not None}
    if len(sizes) != 1:
        raise _Whole(f"a {type(module).__name__} without parameters")
    all_owners = torch.ones(sizes.pop(), dtype=torch.uint8, device="cpu")
    all_owners[torch.tensor(indices)] = owners
    if side in sides and not torch.equal(sides[side], all_owners):
        all_owners = torch.maximum(sides[side], all_owners)
    sides[side] = all_owners


def _accepted(trials: _Trials, groups: list[list[Channels]], chosen: list[Channels]) -> list[Channels]:
    """Return the chosen groups of channels, and those of the others that can be divided with them."""
    if not groups:
        return chosen
    first = chosen + [alternatives[0] for alternatives in groups]
    if trials.agree(first):
        return first
    if len(groups) == 1:
        return next((tried for one in groups[0][1:] if trials.agree(tried := [*chosen, one])), chosen)
    half = len(groups) // 2
    return _accepted(trials, groups[half:], _accepted(trials, groups[:half], chosen))


class _Trials:
    """Runs of copies of a model, which share its parameters, on the example.

    Each subnetwork k runs twice: with narrow modules, as partnets.subnetwork makes them; and with tensors of all
    channels between modules, of which those of later partitions are NaN, so that whatever else computes with them shows.
    """

    def __init__(self, model: nn.Module, example: Any, count: int) -> None:
        self.model, self.example, self.count = model, example, count
        dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
        self.tolerance = max((torch.finfo(dtype).eps for dtype in dtypes), default=1e-7) ** 0.5
        # The shapes of what the dense model returns, in evaluation and in training mode if it runs there.
        self.shapes: dict[bool, list[torch.Size]] = {}
        for mode in (False, True):
            try:
                self.shapes[mode] = [one.shape for one in self.run(mode)]
            except Exception as error:
                if mode:  # such as a batch norm of one example
                    continue
                raise ValueError(
                    f"the model fails with example: {type(error).__name__}: {error}. Pass what it takes: a tensor, a"
                    " tuple of its arguments, or a dict of them by name."
                ) from error

    def roots(self, model: nn.Module, example: Any) -> list[Tensor]:
        """Return what a copy of the model and its modules return, in evaluation and in training mode."""
        found: list[Tensor] = []
        with hooked(model.modules(), after=lambda module, args, kwargs, output: found.extend(tensors(output))):
            for mode in self.shapes:
                _set_mode(model, mode)
                _called(model, example)
        return [tensor for tensor in found if tensor.grad_fn is not None]

    def copied(self) -> tuple[nn.Module, dict[nn.Module, nn.Module]]:
        """Return a copy of the model, and the copy of each module."""
        # The model may write into frozen parameters, such as averages.
        values = {id(p): p.detach() if p.requires_grad else p.detach().clone() for p in self.model.parameters()}
        memo = {key: nn.Parameter(value, value.is_floating_point()) for key, value in values.items()}
        new = copy.deepcopy(self.model, memo)
        return new, dict(zip(self.model.modules(), new.modules(), strict=True))

    def run(
        self, mode: bool, narrow: Mapping[nn.Module, Narrow] | None = None, k: int = 0, padded: bool = False
    ) -> list[Tensor]:
        """Return what the model returns in training mode or not, as dense or as subnetwork k."""
        model, copies = self.copied()
        _set_mode(model, mode)
        own = {copies[module]: one for module, one in (narrow or {}).items()}
        seed(0)
        if (device := device_of(model)).type != "cpu":
            torch.get_device_module(device).manual_seed(0)
        with torch.no_grad(), ExitStack() as stack:
            stack.enter_context(_WithoutDropout())
            if padded:
                for module, one in own.items():
                    _pad(module, one, k)
                stack.enter_context(_Watch())
            elif own:
                stack.enter_context(narrowed(own, k))
            output = _called(model, self.example)
        if isinstance(output, Iterator):
            raise TypeError(
                f"it returns a {type(output).__name__}, whose layers compute when somebody asks; return a list"
            )
        return _content(output)

    def agree(self, groups: Iterable[Channels]) -> bool:
        """Return whether all subnetworks run, return the dense model's shapes, and compute without later channels."""
        try:
            narrow = joined(self.model, groups, self.count)
            for mode, shapes in self.shapes.items():
                for k in range(1, self.count):
                    found = self.run(mode, narrow, k)
                    if [one.shape for one in found] != shapes:
                        return False
                    if not all(map(self._same, found, self.run(mode, narrow, k, padded=True))):
                        return False
        except Exception:  # whatever a model's code does with other widths
            return False
        return True

    def _same(self, ours: Tensor, theirs: Tensor) -> bool:
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return False
        if not (ours.is_floating_point() or ours.is_complex()):
            return torch.equal(ours, theirs)
        largest = float(ours.abs().nan_to_num().amax()) if ours.numel() else 0.0
        return torch.allclose(ours, theirs, rtol=0.0, atol=self.tolerance * largest, equal_nan=True)


class _WithoutDropout(TorchFunctionMode):
    """Leaves out functions that drop entries, of which wider tensors draw others."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


class _Watch(TorchDispatchMode):
    """Raises _Whole where NaN decides about a number that is none, such as an index or a condition."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        is_kept = "pool" in func.name()  # these return which pixel was the largest
        if not is_kept and any(not t.is_floating_point() and not t.is_complex() for t in tensors(output)):
            if any(t.is_floating_point() and t.isnan().any() for t in tensors(args)):
                raise _Whole(f"{func.name()} of channels")
        return output


def _pad(module: nn.Module, one: Narrow, k: int) -> None:
    """Let a module take and return all channels, of which it computes with those of subnetwork k; others are NaN."""
    if one.inputs is not None or one.outputs is not None:
        vars(module)["forward"] = partial(_padded, module, one, k, module.forward)
        return
    for name in one.owners:  # of a module that computes with other channels as well
        parameter = module._parameters[name].detach()
        later = one.partition(name, parameter.shape).to(parameter.device) > k
        module._parameters[name] = parameter.masked_fill(later, torch.nan)


def _padded(module: nn.Module, one: Narrow, k: int, forward, x: Tensor, *args, **kwargs) -> Tensor:
    if one.inputs is not None:
        active = (one.inputs <= k).nonzero()[:, 0].to(x.device)
        x = x.index_select(_dim(module, x, len(one.inputs)), active)
    with narrowed({module: one}, k):
        y = forward(x, *args, **kwargs)
    if one.outputs is None:
        return y
    active = (one.outputs <= k).nonzero()[:, 0].to(y.device)
    dim, shape = _dim(module, y, len(active)), list(y.shape)
    shape[dim] = len(one.outputs)
    return y.new_full(shape, torch.nan).index_copy(dim, active, y)


def _dim(module: nn.Module, tensor: Tensor, size: int) -> int:
    """Return the dimension of the channels of what a module takes or returns, which has so many."""
    if isinstance(module, _ConvNd):
        return -len(module.kernel_size) - 1
    if isinstance(module, _NormBase | nn.GroupNorm | nn.PReLU):
        return 1
    return -1 if tensor.shape[-1] == size else 1


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


def _set_mode(model: nn.Module, mode: bool) -> None:
    """Set the mode of a model, but of layers that compute each channel by itself in both modes."""
    for module in model.train(mode).modules():
        if isinstance(module, _DropoutNd | _NormBase):
            module.eval()


def _called(model: nn.Module, example: Any) -> Any:
    example = copy.deepcopy(example)
    with penalties():
        if isinstance(example, Mapping):
            return model(**example)
        return model(*example) if isinstance(example, tuple) else model(example)


def _content(value: Any, depth: int = 0) -> list[Tensor]:
    """Return tensors, arrays and numbers in what a model returns, and how many parts there are, but no cached keys."""
    if isinstance(value, Tensor):
        return [value]
    if type(value).__module__ == "numpy" or isinstance(value, bool | int | float | complex):
        return [torch.as_tensor(value, device="cpu")]
    is_cache = any(cls.__name__ == "Cache" for cls in type(value).__mro__)  # of transformers
    if isinstance(value, NOTHING) or depth > DEEPEST or is_cache:
        return []
    found = parts(value)
    return [torch.tensor(len(found), device="cpu"), *(one for part in found for one in _content(part, depth + 1))]
