"""Narrow activations: where a model allows it, layers hand on their live units alone."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
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

# How far outputs may be from those of all units, over the largest of them, in units of the dtype's precision.
FAR = 100


def narrow(model: nn.Module, makers: Mapping[nn.Module, set[nn.Module]], example: Any) -> None:
    """Makes the layers of a nested model narrow, as many as can be, so that what is elementwise is skipped as well.

    A model's code may count on the number of units: attention divides it by the number of heads. Whether it does is
    tried: the outputs for the example must stay what they are, in each subnetwork.

    Args:
        model: partitioned, with nested partitions.
        makers: of each layer, those whose outputs it computes with.
        example: see partnets.partition.
    """
    paths = {layer: path for path, layer in partitioned_layers(model)}
    together = [[layer for layer in layers if layer in paths] for layers in _joined(makers.values())]
    held = Held(model, without={name for name, _ in model.named_parameters()})
    try:
        with preserved(device_of(model)), torch.no_grad():
            trial = _Trial(model, to_device(example, device_of(model)))
            able = [layers for layers in together if layers and all(map(_can_be_narrow, layers))]
            while trial.expected is not None:
                alike: dict[tuple, list[list[PartitionedLayer]]] = defaultdict(list)
                for layers in able:  # what has the same place in all blocks of a model is alike
                    alike[tuple(sorted({_kind(paths[layer], layer) for layer in layers}))].append(layers)
                narrowed, taking = trial.narrowed(alike.values())
                torn = _torn(model, narrowed, taking)
                if not torn:
                    break
                fed = {layer for one in torn for layer in (one, *makers.get(one, ()))}
                able = [layers for layers in able if not fed.intersection(layers)]
    finally:
        held.put_back()
    if trial.expected is not None:
        for layer in paths:
            if isinstance(layer, PartitionedLayer):
                layer.is_narrow, layer.takes_narrow = layer in narrowed, layer in taking


def _joined(sets: Iterable[set[nn.Module]]) -> list[set[nn.Module]]:
    """Sets with all that have something in common put together."""
    joined: list[set[nn.Module]] = []
    for new in sets:
        touching = [one for one in joined if one & new]
        joined = [one for one in joined if not one & new]
        joined.append(new.union(*touching))
    return joined


class _Trial:
    """A model and an example, by which it is tried.

    Attributes:
        expected: the outputs of all subnetworks but the last, with no layer narrow; None if one fails.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        self.model, self.example = model, example
        self.trains = self._outputs(training=True) is not None
        self.expected = self._outputs()

    def narrowed(
        self, alike: Iterable[list[list[PartitionedLayer]]]
    ) -> tuple[set[PartitionedLayer], set[PartitionedLayer]]:
        """The layers that can be narrow, and those that take what is."""
        found: set[PartitionedLayer] = set()

        def works(layers: list[PartitionedLayer]) -> bool:
            _set_narrow(layers, True)
            if works := self._is_same():
                found.update(layers)
            _set_narrow(layers, works)
            return works

        for sets in alike:
            if not works([layer for layers in sets for layer in layers]) and len(sets) > 1:
                for layers in sets:
                    works(layers)
        if self.trains and self._outputs(training=True) is None:  # where other code may run
            _set_narrow(found, False)
            found = set()
        taking = self._taking()
        _set_narrow(found, False)
        return found, taking

    def _outputs(self, training: bool = False) -> list[Tensor] | None:
        found = []
        with contextlib.nullcontext() if training else evaluating(self.model):
            for k in range(1, count(self.model)):
                torch.manual_seed(0)
                try:
                    with subnetwork(self.model, k):
                        found += results(called(self.model, self.example))
                except Exception:  # whatever a model's code raises where the sizes are not its own
                    return None
        return found

    def _is_same(self) -> bool:
        ours = self._outputs()
        if ours is None or [one.shape for one in ours] != [one.shape for one in self.expected]:
            return False
        return all(map(_is_near, ours, self.expected))

    def _taking(self) -> set[PartitionedLayer]:
        """The layers whose inputs are narrow now."""
        found = set()

        def note(layer: PartitionedLayer, args: tuple, kwargs: dict) -> None:
            inputs, units = results((args, kwargs))[:1], layer.nesting.inputs
            if inputs and units is not None and inputs[0].shape[layer.unit_dim] < units.size:
                found.add(layer)

        layers = [layer for _, layer in partitioned_layers(self.model) if isinstance(layer, PartitionedLayer)]
        nested = [layer for layer in layers if layer.nesting is not None]
        hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in nested]
        try:
            with evaluating(self.model), subnetwork(self.model, 1):
                called(self.model, self.example)
        finally:
            for hook in hooks:
                hook.remove()
        return found


def _set_narrow(layers: Iterable[PartitionedLayer], is_narrow: bool) -> None:
    for layer in layers:
        layer.is_narrow = is_narrow


def _torn(model: nn.Module, narrowed: set[nn.Module], taking: set[nn.Module]) -> set[nn.Module]:
    """The layers that share a parameter of which an ordinary model would need different parts for them."""
    shapes: dict[nn.Parameter, dict[nn.Module, torch.Size]] = defaultdict(dict)
    for _, layer in partitioned_layers(model):
        for name, parameter in layer.owned():
            if not isinstance(layer, PartitionedLayer) or not isinstance(layer.partitions.get(name), NestedPartition):
                continue
            layer.is_narrow, layer.takes_narrow = layer in narrowed, layer in taking
            whole = layer.seen_by_partition(name, torch.empty(parameter.shape, device="meta"))
            shapes[parameter][layer] = layer.live_block(name, whole, layer.partitions[name], 1).shape
            layer.is_narrow = layer.takes_narrow = False
    return {layer for found in shapes.values() if len(set(found.values())) > 1 for layer in found}


def _kind(path: str, layer: PartitionedLayer) -> tuple[str, str]:
    return re.sub(r"\d+", "*", path), layer.extra_repr()


def _can_be_narrow(layer: nn.Module) -> bool:
    if not isinstance(layer, PartitionedLayer) or not (isinstance(layer, OwnParameters) or layer.nesting is not None):
        return False
    return layer.can_be_narrow and (isinstance(layer, OwnParameters) or not layer.is_read)


def _is_near(ours: Tensor, expected: Tensor) -> bool:
    if not expected.numel():
        return True
    most = FAR * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    return float((ours - expected).abs().max()) <= most
