"""Narrow activations: where a model allows it, layers hand on their live units alone."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from partnets.convert.marks import called, results
from partnets.nn.layer import PartitionedLayer
from partnets.nn.live import subnetwork
from partnets.nn.own_parameters import OwnParameters
from partnets.nn.partitioned import count, partitioned_layers
from partnets.utils.held import Held
from partnets.utils.modules import device_of, evaluating, to_device
from partnets.utils.random_state import preserved

# How far outputs may be from those of all units, over the largest of them, in units of the dtype's precision.
FAR = 100


def narrow(model: nn.Module, together: Collection[set[nn.Module]], example: Any) -> None:
    """Makes the layers of a nested model narrow, as many as can be, so that what is elementwise is skipped as well.

    A model's code may count on the number of units: attention divides it by the number of heads. Whether it does is
    tried: the outputs for the example must stay what they are, in each subnetwork.

    Args:
        model: partitioned, with nested partitions.
        together: sets of layers, of which all are narrow or none.
        example: see partnets.partition.
    """
    paths = {layer: path for path, layer in partitioned_layers(model)}
    alike: dict[tuple, list[list[PartitionedLayer]]] = defaultdict(list)
    for layers in together:
        ours = [layer for layer in layers if layer in paths]
        if ours and all(map(_has_dead_outputs, ours)):
            # What has the same place in all blocks of a model is alike.
            alike[tuple(sorted({_kind(paths[layer], layer) for layer in ours}))].append(ours)
    held = Held(model, without={name for name, _ in model.named_parameters()})
    with preserved(device_of(model)), evaluating(model), torch.no_grad():
        example = to_device(example, device_of(model))
        expected = _outputs(model, example)
        narrowed: list[PartitionedLayer] = []

        def works(layers: list[PartitionedLayer]) -> bool:
            for layer in layers:
                layer.is_narrow = True
            if works := _is_near(_outputs(model, example), expected):
                narrowed.extend(layers)
            for layer in layers:
                layer.is_narrow = works
            return works

        for sets in alike.values():
            if not works([layer for layers in sets for layer in layers]) and len(sets) > 1:
                for layers in sets:
                    works(layers)
        taking = _taking_narrow(model, example)
    held.put_back()
    for _, layer in partitioned_layers(model):
        if isinstance(layer, PartitionedLayer):
            layer.is_narrow, layer.takes_narrow = layer in narrowed, layer in taking


def _kind(path: str, layer: PartitionedLayer) -> tuple[str, str]:
    return re.sub(r"\d+", "*", path), layer.extra_repr()


def _has_dead_outputs(layer: nn.Module) -> bool:
    is_own = isinstance(layer, OwnParameters)
    return isinstance(layer, PartitionedLayer) and (is_own or layer.nesting is not None) and layer.can_be_narrow


def _outputs(model: nn.Module, example: Any) -> list[Tensor] | None:
    """Those of all subnetworks but the last; None if one fails."""
    found = []
    for k in range(1, count(model)):
        torch.manual_seed(0)
        try:
            with subnetwork(model, k):
                found += results(called(model, example))
        except Exception:  # whatever a model's code raises where the sizes are not its own
            return None
    return found


def _is_near(ours: list[Tensor] | None, expected: list[Tensor]) -> bool:
    if ours is None or [one.shape for one in ours] != [one.shape for one in expected]:
        return False
    return all(
        float((a - b).abs().max()) <= FAR * torch.finfo(b.dtype).eps * float(b.abs().max()) if b.numel() else True
        for a, b in zip(ours, expected, strict=True)
    )


def _taking_narrow(model: nn.Module, example: Any) -> set[PartitionedLayer]:
    """The layers whose inputs are narrow."""
    found = set()

    def note(layer: PartitionedLayer, args: tuple, kwargs: dict) -> None:
        inputs, units = results((args, kwargs))[:1], layer.nesting.inputs
        if inputs and units is not None and inputs[0].shape[layer.unit_dim] < units.size:
            found.add(layer)

    hooks = [
        layer.register_forward_pre_hook(note, with_kwargs=True)
        for _, layer in partitioned_layers(model)
        if isinstance(layer, PartitionedLayer) and layer.nesting is not None
    ]
    with subnetwork(model, 1):
        called(model, example)
    for hook in hooks:
        hook.remove()
    return found
