"""find_channels: which channels of a model's modules belong together, and can be partitioned.

torch-pruning's dependency graph (Fang et al., CVPR 2023) proposes groups of channels, or the user declares them. The
graph takes operations that it does not know for elementwise ones, and users err: each group is tried on the example
before it is accepted. See Trials.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import mha
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from partnets.hyper import penalties
from partnets.subnetworks.channels import (
    IN,
    OUT,
    Channels,
    Narrow,
    Side,
    Whole,
    active_of,
    gain_of,
    is_conv1d,
    joined,
    narrowed,
    place_of,
    widths,
)
from partnets.utils.eager import eagerly
from partnets.utils.modules import device_of, hooked, to_device
from partnets.utils.random_state import preserved, seed
from partnets.utils.tree_leaves import content, tensors

ROOTS = (_ConvNd, nn.Linear, nn.Embedding)
# Where channels cannot be partitioned anywhere: as 2 or 3 tensors beside each other, or in heads of so many channels.
BESIDE, HEADS = (2, 3), (8, 16, 32, 64, 128)
# A module, a side, indices of channels there, and those of the same channels in the group's first module.
Entry = tuple[nn.Module, Side, Sequence[int], Sequence[int]]


def find_channels(
    model: nn.Module,
    example: Any,
    proportions: Sequence[float],
    measure: str,
    among: Collection[nn.Module],
    declared: Sequence[Mapping[str, Any]] | None = None,
) -> dict[nn.Module, Narrow]:
    """Return how the modules of a dense model are narrowed, `among` those that may be; see partnets.partition."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model is on the meta device, which computes nothing; move it with to_empty, and fill it.")
    if not all(tensor.numel() for tensor in tensors(example)):
        raise ValueError("example has a tensor without entries, which shows nothing; pass at least one example.")
    owners_of, device = partial(_owners, proportions, measure), device_of(model)
    with preserved(device), eagerly(), _without_fast_path():
        trials = Trials(model, to_device(example, device), len(proportions))
        if declared is not None:
            chosen = _declared(trials, declared, among, owners_of)
        else:
            found = [_alternatives(trials, group, among, owners_of) for group in _traced(trials)]
            chosen = _accepted(trials, [alternatives for alternatives in found if alternatives], [])
    if not chosen:
        raise ValueError(
            f"no channels of this {type(model).__name__} can be partitioned so that narrower subnetworks run on the"
            " example and leave the others out; declare groups as channels=, or use scheme='weight' or 'node'."
        )
    unused = [path for path, one in model.named_modules() if isinstance(one, ROOTS) and one in among - trials.used]
    if unused:
        warnings.warn(
            f"the example does not use {', '.join(unused[:5])}{' and others' if len(unused) > 5 else ''}, of which no"
            " channels are partitioned: code that computes with them and narrow layers will raise an error in narrow"
            " subnetworks. Pass an example that uses all layers, or remove them if nothing does.",
            stacklevel=4,  # past partition and its decorator
        )
    found = joined(model, chosen, len(proportions))
    owned = torch.cat([owners for one in found.values() for dims in one.owners.values() for owners in dims.values()])
    if empty := [k for k, share in enumerate(proportions, 1) if share and k not in owned]:
        warnings.warn(
            f"partition {', '.join(map(str, empty))} of proportions {tuple(proportions)} has no channel of any layer;"
            " pass a larger share, or make the layers wider.",
            stacklevel=4,
        )
    return found


def _owners(proportions: Sequence[float], measure: str, size: int, beside: int = 1, block: int = 1) -> Tensor:
    """Return the partition of each of `size` channels, in blocks, and the same in each part beside the others."""
    owners = torch.ones(size // beside // block, dtype=torch.uint8, device="cpu")
    for end in widths(len(owners), proportions, measure)[:-1]:
        owners[end:] += 1
    return owners.repeat_interleave(block).repeat(beside)


def _declared(
    trials: Trials, groups: Sequence[Mapping[str, Any]], among: Collection[nn.Module], owners_of: Callable[..., Tensor]
) -> list[Channels]:
    """Return the groups that the user has declared, partitioned; raise ValueError if one cannot be."""
    chosen: list[Channels] = []
    for number, group in enumerate(groups):
        try:
            if unknown := group.keys() - {OUT, IN, "block"}:
                raise Whole(f"{sorted(unknown)} is unknown; pass 'outputs', 'inputs' and 'block'")
            entries, block = _entries(trials.model, group, among), group.get("block", 1)
            size = 1 + max(root for *_, roots in entries for root in roots)
            if size % block or size == block:
                raise Whole(f"{size} channels are not several blocks of {block}")
            chosen.append(_divided(entries, owners_of(size, block=block)))
            why = trials.refusal(chosen)
        except Whole as error:
            why = str(error)
        if why:
            raise ValueError(f"channels[{number}] cannot be partitioned: {why}.")
    return chosen


def _entries(model: nn.Module, group: Mapping[str, Any], among: Collection[nn.Module]) -> list[Entry]:
    modules, parameters, places = dict(model.named_modules()), dict(model.named_parameters()), []
    for side in (OUT, IN):
        for path in group.get(side, ()):
            place = modules.get(path), side
            if path in parameters:  # the last dimension that is larger than 1, as torch-pruning takes it
                parent, _, name = path.rpartition(".")
                dims = [dim for dim, size in enumerate(parameters[path].shape) if size > 1]
                place = modules[parent], (name, max(dims, default=0))
            if place[0] not in among or not place_of(*place)[0]:
                raise Whole(f"{path!r} is no partitioned layer, norm or parameter with {side}")
            places.append((*place, _size_of(*place)))
    size = min((own for *_, own in places if own), default=0)
    if not size or any(own and own % size for *_, own in places):
        raise Whole(f"{[own for *_, own in places]} channels are no multiples of one of these numbers")
    entries = []
    for module, side, own in places:
        own = own or size
        roots = [i // (own // size) if side == IN else i % size for i in range(own)]
        entries.append((module, side, range(own), roots))
    return entries


def _traced(trials: Trials) -> list[list[Entry]]:
    """Return the groups of channels that torch-pruning finds."""
    try:
        import torch_pruning
    except ImportError as error:
        raise ImportError(
            "scheme='nested' without channels= needs torch-pruning; install it by pip install 'torch-pruning>=1.6'."
        ) from error
    model, copies = trials.copied()
    originals = {new: module for module, new in copies.items()}
    places = defaultdict(list)
    for new, module in originals.items():
        for name, parameter in new.named_parameters(recurse=False):
            places[parameter].append((module, name))
            parameter.requires_grad_(parameter.is_floating_point())
    conv1d = [module for module in originals if is_conv1d(module)]
    for module in conv1d:  # for torch-pruning's function for Linear
        module.in_features, module.out_features = module.weight.shape

    class Graph(torch_pruning.DependencyGraph):
        def _trace(self, *args, **options) -> dict:
            nodes = super()._trace(*args, **options)
            for node in nodes.values():
                step, is_of_channels = node.grad_fn, None
                dims = len(step._input_metadata[0].shape) if hasattr(step, "_input_metadata") else 0
                if isinstance(node.module, nn.Linear) and dims > 2:
                    self._2d_4d = False  # as torch-pruning sets it for 3
                if isinstance(dim := getattr(step, "_saved_dim", None), int) and dims > 3:
                    is_of_channels = (dim - (dim >> 63 << 64)) % dims == 1  # torch gives -1 as 2**64 - 1
                elif node.type == torch_pruning.ops.OPTYPE.RESHAPE and 2 not in (dims, len(step._saved_self_sym_sizes)):
                    is_of_channels = False  # it neither flattens nor unflattens
                if is_of_channels is False:
                    node.type = torch_pruning.ops.OPTYPE.ELEMENTWISE  # which channels it takes is not followed
                node.enable_index_mapping |= bool(is_of_channels)  # torch-pruning forbids it for parameters [C, 1, 1]
            return nodes

    def forward(model: nn.Module, example: Any) -> list[Tensor]:
        _set_mode(model, True in trials.shapes)
        outputs = _called(model, example)
        return [output for output in tensors(outputs) if output.grad_fn is not None]

    graph = Graph()
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Maximum recursive depth reached")  # torch-pruning leaves these steps out
            pruners = {type(one): torch_pruning.pruner.function.LinearPruner() for one in conv1d}
            graph.build_dependency(model, trials.example, forward, customized_pruners=pruners, verbose=False)
            groups = list(graph.get_all_groups(root_module_types=[*ROOTS, *map(type, conv1d)]))
    except Exception as error:
        raise ValueError(
            f"torch-pruning cannot follow this {type(model).__name__}: {type(error).__name__}: {error}; declare its"
            " channels as channels=, or use scheme='weight' or 'node'."
        ) from error
    found: list[tuple[set, list[Entry]]] = []
    for group in groups:
        entries: list[Entry] = []
        for item in group:
            node, indices = item.dep.target, (item.idxs, item.root_idxs)
            if isinstance(node.module, nn.Parameter):
                entries += [(module, (name, node.pruning_dim), *indices) for module, name in places[node.module]]
            elif node.module in originals:  # and no operation without parameters
                side = OUT if graph.is_out_channel_pruning_fn(item.dep.handler) else IN
                entries.append((originals[node.module], side, *indices))
        own = {
            (parameter, dim)
            for module, side, *_ in entries
            for name, dim in place_of(module, side)[0].items()
            if (parameter := module._parameters.get(name)) is not None
        }
        tied = (one for one in found if one[0] & own and len(one[1][0][2]) == len(entries[0][2]))
        known, first = next(tied, (own, []))
        if not first:
            found.append((known, first))
        known |= own
        first += entries
    for node in graph.module2node.values():  # nodes refer to each other, and would keep tensors alive
        vars(node).clear()
    return [entries for _, entries in found]


def _alternatives(
    trials: Trials, group: list[Entry], among: Collection[nn.Module], owners_of: Callable[..., Tensor]
) -> list[Channels]:
    """Return how a group of channels that belong together may be partitioned, from the best to the last resort."""
    if all(side == OUT for _, side, *_ in group) or not among.issuperset(module for module, *_ in group):
        return []  # the model's outputs, or a part that stays as it is
    size, norms = len(group[0][2]), [module for module, *_ in group if isinstance(module, nn.GroupNorm)]
    of_groups = math.lcm(*(norm.num_channels // norm.num_groups for norm in norms))
    found = []
    for beside, block in dict.fromkeys([(1, 1), (1, of_groups), *((n, 1) for n in BESIDE), *((1, n) for n in HEADS)]):
        if size % (beside * block) or size < 2 * beside * block:
            continue
        try:
            channels = _divided(group, owners_of(size, beside, block))
            joined(trials.model, [channels], trials.num_partitions)
        except (Whole, IndexError):  # torch-pruning may relate channels that do not exist
            continue
        found.append(channels)
    return found


def _divided(group: list[Entry], owners: Tensor) -> Channels:
    """Return a group's channels with the owners of its first module's; others belong to partition 1."""
    if owners.max() == 1:
        raise Whole("partition 1 would have all of them")
    channels: Channels = defaultdict(dict)
    for module, side, indices, roots in group:
        if isinstance(module, nn.PReLU) and module.num_parameters == 1:
            continue
        if not isinstance(side, str) and side[0] == gain_of(module):
            side = OUT
        if not place_of(module, side)[0]:
            raise Whole(f"a {type(module).__name__} cannot be narrowed")
        if None in roots:  # of grouped queries
            raise Whole(f"torch-pruning does not follow the {side} of a {type(module).__name__}")
        own = torch.ones(_size_of(module, side) or max(indices) + 1, dtype=torch.uint8, device="cpu")
        own[torch.tensor(indices, device="cpu")] = owners[torch.tensor(roots, device="cpu")]
        channels[module][side] = torch.maximum(channels[module].get(side, own), own)
    return channels


def _size_of(module: nn.Module, side: Side) -> int | None:
    """Return a module's number of channels; None if no parameter or buffer tells it."""
    found = ((getattr(module, name, None), dim) for name, dim in place_of(module, side)[0].items())
    return next((tensor.shape[dim] for tensor, dim in found if tensor is not None), None)


def _accepted(trials: Trials, groups: list[list[Channels]], chosen: list[Channels]) -> list[Channels]:
    """Return the chosen groups of channels, and those of the others that can be partitioned with them."""
    if not groups:
        return chosen
    first = chosen + [alternatives[0] for alternatives in groups]
    if not trials.refusal(first):
        return first
    if len(groups) == 1:
        return next((tried for one in groups[0][1:] if not trials.refusal(tried := [*chosen, one])), chosen)
    half = len(groups) // 2
    return _accepted(trials, groups[half:], _accepted(trials, groups[:half], chosen))


class Trials:
    """Runs copies of a model on an example: dense, narrow, and padded.

    Between its layers, a padded network has the widths of the dense one. Each layer takes and returns NaN for inactive
    channels. If it returns the same as the narrow network, no code of the model mixes or moves channels, or
    computes with their number.

    Attributes:
        shapes: those of the dense model's outputs, in evaluation mode, and in training mode if it runs there.
        used: the modules that the dense model has called, and those that MultiheadAttention uses without calls.
    """

    def __init__(self, model: nn.Module, example: Any, num_partitions: int) -> None:
        self.model, self.example, self.num_partitions = model, example, num_partitions
        dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
        self.tolerance = max((torch.finfo(dtype).eps for dtype in dtypes), default=1e-7) ** 0.5
        self.shapes: dict[bool, list[torch.Size]] = {}
        self.used = {one.out_proj for one in model.modules() if isinstance(one, nn.MultiheadAttention)}
        for mode in (False, True):
            try:
                self.shapes[mode] = [one.shape for one in self.run(mode)]
            except Exception as error:
                if mode:
                    continue
                raise ValueError(
                    f"the model fails with example: {type(error).__name__}: {error}. Pass what it takes: a tensor, a"
                    " tuple of its arguments, or a dict of them by name."
                ) from error

    def copied(self) -> tuple[nn.Module, dict[nn.Module, nn.Module]]:
        """Return a copy of the model, and the copy of each module."""
        new = copy.deepcopy(self.model, {id(b): b.clone() for b in self.model.buffers()})  # copy has no sparse ones
        return new, dict(zip(self.model.modules(), new.modules(), strict=True))

    @torch.no_grad()
    def run(
        self, mode: bool, narrow: Mapping[nn.Module, Narrow] | None = None, k: int = 0, is_padded: bool = False
    ) -> list[Tensor]:
        """Return the outputs in training mode or not, as dense or as subnetwork k."""
        model, copies = self.copied()
        _set_mode(model, mode)
        torch.manual_seed(0)
        seed(0)
        if narrow is None:
            originals = {new: module for module, new in copies.items()}
            with hooked(originals, before=lambda module, *_: self.used.add(originals[module])):
                return content(_called(model, self.example))
        own = {copies[module]: one for module, one in narrow.items()}
        if is_padded:
            for module, one in own.items():
                _pad(module, one, k)
            own = {}
        with narrowed(own, k):
            return content(_called(model, self.example))

    def refusal(self, groups: Iterable[Channels]) -> str:
        """Return why these groups of channels cannot be partitioned together; nothing if they can."""
        try:
            narrow = joined(self.model, groups, self.num_partitions)
            for mode, shapes in self.shapes.items():
                for k in range(1, self.num_partitions):
                    found, padded = self.run(mode, narrow, k), self.run(mode, narrow, k, is_padded=True)
                    if [one.shape for one in found] != shapes:
                        return f"subnetwork {k} returns tensors of other shapes"
                    if not all(self._are_alike(*pair, mode) for pair in zip(found, padded, strict=True)):
                        return "code of the model mixes or moves channels, or computes with their number"
        except Exception as error:  # whatever a model's code does with other widths
            return f"{type(error).__name__}: {error}"
        return ""

    def _are_alike(self, ours: Tensor, theirs: Tensor, mode: bool) -> bool:
        if mode:  # code may draw other noise for other widths
            return torch.equal(ours.isnan(), theirs.isnan())
        ours, theirs = ours.to(torch.complex128), theirs.to(torch.complex128)
        largest = float(ours.abs().nan_to_num().amax()) if ours.numel() else 0.0
        return torch.allclose(ours, theirs, rtol=0.0, atol=self.tolerance * largest, equal_nan=True)


def _pad(module: nn.Module, one: Narrow, k: int) -> None:
    """Let a module take and return all channels: those of subnetwork k are computed, and the others are NaN."""
    if one.inputs is not None or one.outputs is not None:
        vars(module)["forward"] = partial(_padded, module, one, k, module.forward)
        return
    for name in one.owners:  # of a module that computes with other channels as well
        parameter = module._parameters[name].detach()
        later = one.partition(name, parameter.shape).to(parameter.device) > k
        module._parameters[name] = parameter.masked_fill(later, torch.nan)


def _padded(module: nn.Module, one: Narrow, k: int, forward, x: Tensor, *args, **kwargs) -> Tensor:
    if one.inputs is not None:
        x = x.index_select(_dim(module, x, len(one.inputs)), active_of(one.inputs, k).to(x.device))
    with narrowed({module: one}, k):
        y = forward(x, *args, **kwargs)
    if one.outputs is None:
        return y
    active = active_of(one.outputs, k).to(y.device)
    dim, shape = _dim(module, y, len(active)), list(y.shape)
    shape[dim] = len(one.outputs)
    return y.new_full(shape, torch.nan).index_copy(dim, active, y)


def _dim(module: nn.Module, tensor: Tensor, size: int) -> int:
    """Return the dimension of the channels in a module's input or output, which has so many dimensions."""
    if isinstance(module, _ConvNd):
        return -len(module.kernel_size) - 1
    if isinstance(module, _NormBase | nn.GroupNorm | nn.PReLU):
        return 1
    return -1 if tensor.shape[-1] == size else 1


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Let transformer layers call their modules: their fast path in evaluation mode reads the weights instead."""
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(before)


def _set_mode(model: nn.Module, mode: bool) -> None:
    """Set the mode of a model, but of batch norms, which cannot train on a single example."""
    for module in model.train(mode).modules():
        if isinstance(module, _NormBase):
            module.eval()


def _called(model: nn.Module, example: Any) -> Any:
    example = copy.deepcopy(example, {id(tensor): tensor.clone() for tensor in tensors(example)})
    with penalties():
        if isinstance(example, Mapping):
            return model(**example)
        return model(*example) if isinstance(example, tuple) else model(example)
