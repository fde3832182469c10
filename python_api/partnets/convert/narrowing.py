"""Narrow activations: where a model allows it, layers hand on their live units alone."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from partkernels import NestedPartition
from partnets.convert.marks import (
    NEGATIVE,
    POSITIVE,
    SMALL,
    Few,
    OfOne,
    Seen,
    WithoutDropout,
    called,
    is_whole,
    results,
)
from partnets.convert.merging import merge
from partnets.convert.units import Search
from partnets.nn.layer import PartitionedLayer
from partnets.nn.live import subnetwork, trying
from partnets.nn.nesting import Nesting
from partnets.nn.own_parameters import OwnParameters
from partnets.nn.partitioned import count, partitioned_layers
from partnets.utils.held import Held
from partnets.utils.modules import (
    device_of,
    disagreeing,
    evaluating,
    hooked,
    in_float32,
    is_half,
    to_device,
    training_quietly,
)
from partnets.utils.random_state import preserved

# How far what layers are given may be apart by rounding, over the largest number: so many units of the precision, or so
# much.
ROUNDED, LEAST = 4, 1e-5
# How far outputs may be from those of all units, over the largest of them: rounding may have grown through the layers.
FAR = 0.1
# And those of a merged subnetwork, whose products are the same.
MERGED = 1e-4


def can_be_narrow(found: Search, nestings: Mapping[nn.Module, Nesting]) -> tuple[list[set[nn.Module]], set[nn.Module]]:
    """Sets of layers, and of modules with own parameters, that can hand on their live units alone; who takes those.

    A model's code may count on the number of units: attention divides it by the number of heads. Whether it does is
    tried in runs of subnetworks, with random numbers in place of all that layers compute: what is given to each layer,
    the model's outputs, and what it keeps, as a number that its first call makes, must be what they are where all units
    are handed on. Each run begins with what the model keeps now. A model of which a part did not compute
    for the example has none: nobody knows what that part would do.
    """
    if not _has_computed(found):
        return [], set()
    with in_float32(found.runs.model):  # or rounding would hide what a gate by a mean makes of fewer units
        return _tried(found, nestings)


def _tried(found: Search, nestings: Mapping[nn.Module, Nesting]) -> tuple[list[set[nn.Module]], set[nn.Module]]:
    """See can_be_narrow."""
    example = tree_map(lambda leaf: leaf.float() if is_half(leaf) else leaf, found.runs.example)
    outputs = {layer: nesting.outputs for layer, nesting in nestings.items()}
    own, last = found.values(found.own), found.count - 1
    tried = [(found.modes[0], k, between) for k, between in ((1, POSITIVE), (min(2, last), NEGATIVE), (last, SMALL))]
    tried += [(mode, 1, POSITIVE) for mode in found.modes[1:]]
    model = found.runs.model
    of_layers = {f"{path}." for path, module in model.named_modules() if module in found.runs.rules}
    without = {name for name, _ in model.named_parameters()}
    without |= {name for name, _ in model.named_buffers() if name[: name.rfind(".") + 1] in of_layers}
    start = Held(model, without)
    of_one = OfOne({layer for layer, rule in found.runs.rules.items() if rule.keeps_units})

    taking, given_few = set(), set()

    def runs(narrow: Collection[nn.Module]) -> Iterator[tuple[Seen, Held]]:
        taking.clear()
        for mode, k, between in tried:
            live = {layer: units.owners() <= k for layer, units in found.outputs.items()}
            values = {place: value[k - 1] for place, value in own.items()}
            few = Few(k, narrow, outputs, found.inputs, found.along, taking)
            try:
                with mode(), WithoutDropout(), of_one:
                    seen = found.runs.run(live, values, few=few, example=example, between=between)
                kept = Held(model, without)
            finally:
                start.put_back()
            yield seen, kept

    def able(layer: nn.Module) -> bool:
        if layer in found.runs.rules:
            return layer in outputs and found.runs.rules[layer].may_be_narrow(layer, outputs[layer])
        return any(module is layer for module, _ in found.along)

    try:
        expected = list(runs(()))
    except Exception:  # as where a mode needs more examples
        return [], set()
    paths = {module: path for path, module in model.named_modules()}
    alike: dict[tuple, list[set[nn.Module]]] = defaultdict(list)
    for one in _joined(found.makers.values()):
        if one and all(map(able, one)) and not one & (found.whole | of_one.makers):
            # What has the same place in all blocks of a model is alike.
            kinds = {(re.sub(r"\d+", "*", paths[layer]), repr(outputs.get(layer))) for layer in one}
            alike[tuple(sorted(kinds))].append(one)
    narrow: list[set[nn.Module]] = []

    def works(sets: list[set[nn.Module]]) -> bool:
        try:
            works = all(map(_is_same, runs(set().union(*narrow, *sets)), expected))
        except Exception:  # whatever a model's code raises where the sizes are not its own
            return False
        if works:
            narrow.extend(sets)
            given_few.update(taking)
        return works

    # All are made narrow; where that does not work, each half that does; at last each set of a kind.
    waiting: list[list[list[set[nn.Module]]]] = [list(alike.values())] if alike else []
    while waiting:
        kinds = waiting.pop()
        if not works([one for sets in kinds for one in sets]):
            parts = kinds if len(kinds) > 1 else [[one] for one in kinds[0]]
            if len(parts) > 1:
                waiting += [parts[len(parts) // 2 :], parts[: len(parts) // 2]]
    return narrow, given_few


def _has_computed(found: Search) -> bool:
    """Whether all layers and own parameters of a model have, or share what they have with those that have."""
    used = {*found.makers, *(one for makers in found.makers.values() for one in makers), *found.whole}
    known = {parameter for layer in used for parameter in layer.parameters(recurse=False)}
    learning = {module for (module, _), parameter in found.runs.own.items() if parameter.requires_grad}
    rest = {*found.runs.rules, *learning} - used
    return all(known.issuperset(p for p in layer.parameters(recurse=False) if p.requires_grad) for layer in rest)


def _joined(sets: Iterable[set[nn.Module]]) -> list[set[nn.Module]]:
    """Sets with all that have something in common put together."""
    joined: list[set[nn.Module]] = []
    for new in sets:
        touching = [one for one in joined if one & new]
        joined = [one for one in joined if not one & new]
        joined.append(new.union(*touching))
    return joined


def _is_same(run: tuple[Seen, Held], expected: tuple[Seen, Held]) -> bool:
    """Whether layers were given the same in two runs, and the outputs are, but for rounding, in sums of fewer units.

    What the model keeps then must be the same too.
    """
    (one, kept), (other, usual) = run, expected
    if usual.changed(kept):
        return False
    return len(one.computed) == len(other.computed) and all(
        a is b and _is_near(x, y) for (a, x), (b, y) in zip(one.computed, other.computed, strict=True)
    )


def _is_near(x: Tensor, y: Tensor, most: float | None = None) -> bool:
    """Whether two tensors differ by so much at most, over the largest number; by rounding alone if None.

    What is not finite, as roots of negative numbers are, must be so in both.
    """
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if (are_equal := torch.equal(x, y)) or is_whole(y):
        return are_equal
    most = max(ROUNDED * torch.finfo(y.dtype).eps, LEAST) if most is None else most
    finite = y.isfinite()
    if not torch.equal(x.isfinite(), finite):
        return False
    x, y = x[finite], y[finite]
    return not y.numel() or float((x - y).abs().max()) <= most * float(y.abs().max())


def narrow(
    model: nn.Module,
    sets: Collection[set[nn.Module]],
    makers: Mapping[nn.Module, set[nn.Module]],
    unseen: Collection[nn.Module],
    example: Any,
) -> None:
    """Makes layers of a nested model narrow, so that what is elementwise is skipped as well.

    Not those whose parameters others read, or share in a way in which an ordinary model could not. That the model
    computes the same then, and in training at all, is tried once more, as it is now.

    Args:
        model: partitioned, with nested partitions.
        sets: of layers that can be narrow; see can_be_narrow.
        makers: of each layer, those whose outputs it computes with.
        unseen: layers that take live units alone, also if the example does not come to them, as to some experts.
        example: see partnets.partition.
    """
    layers = [layer for _, layer in partitioned_layers(model) if isinstance(layer, PartitionedLayer)]
    able = [one for one in sets if not any(_is_read(layer) for layer in one)]
    if not able:
        return
    held = Held(model)
    narrowed, taking = set(), set()
    try:
        with preserved(device_of(model)), torch.no_grad(), trying(model):
            example = to_device(example, device_of(model))
            trains, expected = _outputs(model, example, training=True) is not None, _outputs(model, example)
            while able and expected is not None:
                narrowed = set().union(*able)
                _make_narrow(layers, narrowed, ())
                taking = set()
                if (ours := _outputs(model, example)) is not None:
                    fed = {layer for layer in unseen if makers.get(layer, set()) & narrowed}
                    taking = _taking(model, example, fed)
                runs = ours is not None and not (trains and _outputs(model, example, training=True) is None)
                _make_narrow(layers, (), ())
                if not runs or not _are_near(ours, expected, FAR):
                    narrowed, taking = set(), set()
                    break
                if not (torn := disagreeing(_blocks(layers, narrowed, taking))):
                    break
                fed = {layer for one in torn for layer in (one, *makers.get(one, ()))}
                able, narrowed, taking = [one for one in able if not fed & one], set(), set()
            usual = _gradients(model, example) if narrowed else None
            _make_narrow(layers, narrowed, taking)
            if narrowed and not (_merges(model, example) and _are_alike(_gradients(model, example), usual)):
                narrowed, taking = set(), set()
    finally:
        held.put_back()
    _make_narrow(layers, narrowed, taking)


def _make_narrow(layers: Iterable[PartitionedLayer], narrowed: Collection, taking: Collection) -> None:
    for layer in layers:
        layer.is_narrow, layer.takes_narrow = layer in narrowed, layer in taking


def _gradients(model: nn.Module, example: Any) -> list[Tensor | None] | None:
    """Of what learns in subnetwork 1, by the mean square of its outputs; None if there are none."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.manual_seed(0)
    try:
        with torch.enable_grad(), evaluating(model), subnetwork(model, 1, 1):
            squares = [one.abs().square().mean() for one in results(called(model, example)) if one.requires_grad]
            return list(torch.autograd.grad(sum(squares), learning, allow_unused=True))
    except Exception:  # as of outputs without a graph
        return None


def _are_alike(ours: list[Tensor | None] | None, usual: list[Tensor | None] | None) -> bool:
    """Whether gradients are the same but for rounding: code that divides by the number of units makes other ones."""
    if usual is None:
        return True
    return ours is not None and all(
        a is b if a is None or b is None else _is_near(a, b, FAR) for a, b in zip(ours, usual, strict=True)
    )


def _merges(model: nn.Module, example: Any) -> bool:
    """Whether all subnetworks compute the same merged, of layers that tell their code of fewer units."""
    example = tree_map(lambda leaf: leaf.float() if is_half(leaf) else leaf, example)
    with in_float32(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of statistics that nothing has moved
        try:
            with evaluating(model):
                return all(_is_same_merged(model, k, example) for k in range(1, count(model)))
        except Exception:  # as where code puts the layers' parameters together
            return False


def _is_same_merged(model: nn.Module, k: int, example: Any) -> bool:
    torch.manual_seed(0)
    with subnetwork(model, k):
        expected = results(called(model, example))
    torch.manual_seed(0)
    return _are_near(results(called(merge(model, active=k), example)), expected, MERGED)


def _is_read(layer: PartitionedLayer) -> bool:
    return layer.is_read and not isinstance(layer, OwnParameters)


def _outputs(model: nn.Module, example: Any, training: bool = False) -> list[Tensor] | None:
    """Those of all subnetworks but the last; None if one fails."""
    found = []
    with training_quietly(model) if training else evaluating(model):
        for k in range(1, count(model)):
            torch.manual_seed(0)
            try:
                with subnetwork(model, k):
                    found += results(called(model, example))
            except Exception:  # whatever a model's code raises where the sizes are not its own
                return None
    return found


def _are_near(ours: list[Tensor], expected: list[Tensor], most: float) -> bool:
    return len(ours) == len(expected) and all(_is_near(a, b, most) for a, b in zip(ours, expected, strict=True))


def _taking(model: nn.Module, example: Any, unseen: set[nn.Module]) -> set[nn.Module]:
    """The layers whose inputs are narrow now; and those of `unseen` to which the example does not come."""
    found, called = set(), set()

    def note(layer: PartitionedLayer, args: tuple, kwargs: dict) -> None:
        inputs, units = results((args, kwargs))[:1], layer.nesting.inputs
        called.add(layer)
        if inputs and units is not None and inputs[0].shape[layer.unit_dim] < units.size:
            found.add(layer)

    layers = [layer for _, layer in partitioned_layers(model) if isinstance(layer, PartitionedLayer)]
    nested = [layer for layer in layers if layer.nesting is not None]
    with hooked(nested, note):
        for training in (False, True):
            _outputs(model, example, training)
    return found | (unseen & set(nested)) - called


def _blocks(
    layers: Collection[PartitionedLayer], narrowed: set[nn.Module], taking: set[nn.Module]
) -> Iterator[tuple[nn.Parameter, PartitionedLayer, torch.Size]]:
    """Of each nested parameter of a layer, the shape of what an ordinary model would need of it."""
    _make_narrow(layers, narrowed, taking)
    for layer in layers:
        for name, parameter in layer.owned():
            if isinstance(partition := layer.partitions.get(name), NestedPartition):
                whole = layer.seen_by_partition(name, torch.empty(parameter.shape, device="meta"))
                yield parameter, layer, layer.live_block(name, whole, partition, 1).shape
    _make_narrow(layers, (), ())
