"""Narrow activations: where a model allows it, layers hand on their live units alone."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from partkernels import NestedPartition
from partnets.convert.marks import called, results
from partnets.nn.layer import PartitionedLayer
from partnets.nn.live import subnetwork
from partnets.nn.own_parameters import OwnParameters
from partnets.nn.partitioned import count, partitioned_layers
from partnets.utils.held import Held
from partnets.utils.modules import device_of, evaluating, to_device
from partnets.utils.random_state import preserved

# How far outputs may be from those of all units, over the largest of them: rounding may have grown through the layers.
FAR = 0.1


def narrow(
    model: nn.Module, sets: Collection[set[nn.Module]], makers: Mapping[nn.Module, set[nn.Module]], example: Any
) -> None:
    """Makes layers of a nested model narrow, so that what is elementwise is skipped as well.

    Not those whose parameters others read, or share in a way in which an ordinary model could not. That the model
    computes the same then, and in training at all, is tried once more, as it is now.

    Args:
        model: partitioned, with nested partitions.
        sets: of layers that can be narrow; see plan.
        makers: of each layer, those whose outputs it computes with.
        example: see partnets.partition.
    """
    layers = [layer for _, layer in partitioned_layers(model) if isinstance(layer, PartitionedLayer)]
    able = [one for one in sets if not any(_is_read(layer) for layer in one)]
    if not able:
        return
    held = Held(model, without={name for name, _ in model.named_parameters()})
    narrowed, taking = set(), set()
    try:
        with preserved(device_of(model)), torch.no_grad():
            example = to_device(example, device_of(model))
            trains, expected = _outputs(model, example, training=True) is not None, _outputs(model, example)
            while able and expected is not None:
                narrowed = set().union(*able)
                _set_narrow(narrowed, True)
                taking = set() if (ours := _outputs(model, example)) is None else _taking(model, example)
                runs = ours is not None and not (trains and _outputs(model, example, training=True) is None)
                _set_narrow(narrowed, False)
                if not runs or not _are_near(ours, expected):
                    narrowed, taking = set(), set()
                    break
                if not (torn := _torn(layers, narrowed, taking)):
                    break
                fed = {layer for one in torn for layer in (one, *makers.get(one, ()))}
                able, narrowed, taking = [one for one in able if not fed & one], set(), set()
    finally:
        held.put_back()
    for layer in layers:
        layer.is_narrow, layer.takes_narrow = layer in narrowed, layer in taking


def _is_read(layer: PartitionedLayer) -> bool:
    return layer.is_read and not isinstance(layer, OwnParameters)


def _outputs(model: nn.Module, example: Any, training: bool = False) -> list[Tensor] | None:
    """Those of all subnetworks but the last; None if one fails."""
    found = []
    with contextlib.nullcontext() if training else evaluating(model):
        for k in range(1, count(model)):
            torch.manual_seed(0)
            try:
                with subnetwork(model, k):
                    found += results(called(model, example))
            except Exception:  # whatever a model's code raises where the sizes are not its own
                return None
    return found


def _are_near(ours: list[Tensor], expected: list[Tensor]) -> bool:
    return len(ours) == len(expected) and all(
        a.shape == b.shape and (not b.numel() or float((a - b).abs().max()) <= FAR * float(b.abs().max()))
        for a, b in zip(ours, expected, strict=True)
    )


def _taking(model: nn.Module, example: Any) -> set[PartitionedLayer]:
    """The layers whose inputs are narrow now."""
    found = set()

    def note(layer: PartitionedLayer, args: tuple, kwargs: dict) -> None:
        inputs, units = results((args, kwargs))[:1], layer.nesting.inputs
        if inputs and units is not None and inputs[0].shape[layer.unit_dim] < units.size:
            found.add(layer)

    layers = [layer for _, layer in partitioned_layers(model) if isinstance(layer, PartitionedLayer)]
    nested = [layer for layer in layers if layer.nesting is not None]
    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in nested]
    try:
        for training in (False, True):
            _outputs(model, example, training)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _set_narrow(layers: Iterable[PartitionedLayer], is_narrow: bool) -> None:
    for layer in layers:
        layer.is_narrow = is_narrow


def _torn(
    layers: Collection[PartitionedLayer], narrowed: set[nn.Module], taking: set[nn.Module]
) -> set[PartitionedLayer]:
    """The layers that share a parameter of which an ordinary model would need different parts for them."""
    shapes: dict[nn.Parameter, dict[nn.Module, torch.Size]] = defaultdict(dict)
    for layer in layers:
        layer.is_narrow, layer.takes_narrow = layer in narrowed, layer in taking
        for name, parameter in layer.owned():
            if isinstance(partition := layer.partitions.get(name), NestedPartition):
                whole = layer.seen_by_partition(name, torch.empty(parameter.shape, device="meta"))
                shapes[parameter][layer] = layer.live_block(name, whole, partition, 1).shape
        layer.is_narrow = layer.takes_narrow = False
    return {layer for found in shapes.values() if len(set(found.values())) > 1 for layer in found}
