"""explain_partition: what a subnetwork skips, layer by layer, and why not more."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from partkernels import NestedPartition, Partition
from partnets.convert.marks import called, results
from partnets.nn.layer import PartitionedLayer
from partnets.nn.partitioned import count, partitioned_layers
from partnets.utils.modules import device_of, evaluating, hooked, to_device
from partnets.utils.random_state import preserved


@dataclass(frozen=True)
class LayerExplanation:
    """Of one layer with a weight.

    Attributes:
        path, kind: where it is, and the name of its class.
        outputs, inputs: how many are live in subnetwork 1..C; None of a layer that is not nested.
        computed: which part of the weight subnetwork 1..C computes with.
        work: multiply-adds of the whole network for an example; entries of the weight where none was given.
        narrow: whether it hands on its live outputs alone.
        why: why it is not nested, or less than it could be; "" if nothing is in the way.
    """

    path: str
    kind: str
    outputs: tuple[int, ...] | None
    inputs: tuple[int, ...] | None
    computed: tuple[float, ...]
    work: float
    narrow: bool
    why: str


@dataclass(frozen=True)
class Explanation:
    """Of all layers with weights; str() gives a table.

    Attributes:
        layers: in the order of the model's modules.
    """

    layers: tuple[LayerExplanation, ...]

    def computed(self, active: int) -> float:
        """Which part of all multiply-adds subnetwork `active` computes; of all weights, where no example was given."""
        return sum(one.computed[active - 1] * one.work for one in self.layers) / sum(one.work for one in self.layers)

    def __str__(self) -> str:
        rows = [("layer", "outputs", "inputs", "computed", "")]
        for one in self.layers:
            units = (" ".join(map(str, ends)) if ends else "all" for ends in (one.outputs, one.inputs))
            shares = " ".join(f"{share:.0%}" for share in one.computed)
            notes = ", ".join(filter(None, ("narrow" if one.narrow else "", one.why and f"its {one.why}")))
            rows.append((f"{one.path or 'itself'} ({one.kind})", *units, shares, notes))
        counts = range(1, len(self.layers[0].computed) + 1) if self.layers else ()
        rows.append(("all", "", "", " ".join(f"{self.computed(k):.0%}" for k in counts), ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def explain_partition(model: nn.Module, example: Any = None) -> Explanation:
    """What of each layer's weight a subnetwork computes with, and why it is not less.

    Layers that are divided at random compute with all of their weight. Nested ones compute with their live outputs and
    inputs alone: see partnets.partition.

    Args:
        model: with partitioned layers.
        example: what the model is called with once, to count the multiply-adds of each layer: a tensor, a tuple of its
            arguments, or a dict of them by name. Without one, entries of the weights are counted.

    Raises:
        ValueError: the model has no partitioned layers.

    Example:
        >>> import partnets
        >>> model, x = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 3)), torch.zeros(1, 4)
        >>> print(explain_partition(partnets.partition(model, (0.8, 0.2), scheme="nested", example=x)))
        layer       outputs  inputs  computed
        0 (Linear)  16 20    4 4     80% 100%  narrow
        2 (Linear)  3 3      16 20   80% 100%
        all                          80% 100%
    """
    number = count(model)
    layers = {
        path: layer
        for path, layer in partitioned_layers(model)
        if isinstance(layer, PartitionedLayer) and layer.weights and layer.partitions
    }
    places = {} if example is None else _places(model, example)
    found = []
    for path, layer in layers.items():
        weights = {name: layer.partitions[name] for name in layer.weights if name in layer.partitions}
        if not weights:
            continue
        entries = sum(layer._parameters[name].numel() for name in weights)
        live = [sum(part) for part in zip(*(_computed(partition) for partition in weights.values()), strict=True)]
        units = (None, None) if layer.nesting is None else layer.nesting[:2]
        outputs, inputs = (one and tuple(one.number(k) for k in range(1, number + 1)) for one in units)
        work = entries * places.get(layer, 0) if places else entries
        found.append(
            LayerExplanation(
                path,
                type(layer).__name__,
                outputs,
                inputs,
                tuple(one / entries for one in live),
                work,
                layer.is_narrow,
                layer.whole_because or "",
            )
        )
    return Explanation(tuple(found))


def _computed(partition: Partition) -> list[int]:
    """How many entries subnetwork 1..C computes with."""
    if isinstance(partition, NestedPartition):
        return list(itertools.accumulate(partition.sizes()))
    return [math.prod(partition.shape)] * partition.count


def _places(model: nn.Module, example: Any) -> dict[nn.Module, float]:
    """How often each layer multiplies by its weight: for each position of its outputs."""
    found: dict[nn.Module, float] = {}

    def note(layer: PartitionedLayer, args: tuple, kwargs: dict, output: Any) -> None:
        y, units = results(output)[:1], layer.unit_dim
        if y and units is not None and layer.unit_inputs:
            found[layer] = found.get(layer, 0) + y[0].numel() / y[0].shape[units]

    layers = [layer for _, layer in partitioned_layers(model) if isinstance(layer, PartitionedLayer)]
    device = device_of(model)
    with preserved(device), evaluating(model), hooked(layers, after=note), torch.no_grad():
        called(model, to_device(example, device))
    return found
