"""Footprint: what a model and its optimiser keep in memory between steps, counted or by arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from benchmarks.layer import Division
from benchmarks.schemes import Where
from benchmarks.train_step import TrainStep
from partkernels.formats import packed_map
from partnets.convert.partitioning import find
from partnets.nn.partitioned import partitioned_layers

MOMENTS = {"adam": 2, "sgd": 1}


@dataclass(frozen=True)
class Footprint:
    """Bytes.

    Attributes:
        parameters: weights, biases, and what else is trained.
        map: who owns each weight.
        defaults: what replaces weights that are not live.
        state: the optimiser's moments.
    """

    parameters: float
    map: float
    defaults: float
    state: float

    @classmethod
    def counted(cls, step: TrainStep) -> Footprint:
        """Of tensors that are there, after a step."""
        parameters = _bytes(step.model.parameters())
        ids, defaults = [], []
        for _, layer in partitioned_layers(step.model):
            for partition in getattr(layer, "partitions", {}).values():
                ids.append(partition.map)
                defaults += [partition.defaults.stored] if partition.defaults.stored is not None else []
        for module in step.model.modules():
            if isinstance(module, Where):
                ids.append(module.ids)
                defaults.append(module.defaults)
        moments = (t for t in step.state() if t.is_floating_point() and t.dim())  # not the step counts
        return cls(parameters, _bytes(ids), _bytes(defaults), _bytes(moments))

    @classmethod
    def computed(cls, scheme: str, model: nn.Module, division: Division, optimizer: str) -> Footprint:
        """Of an ordinary model, on any device, if it were under a scheme: 'dense', 'paper', 'partkernels' or 'floor'.

        The floor is the least that any scheme could keep: log2 of the number of such assignments, which is the entropy
        of the proportions a weight. (An assignment that is drawn from a seed could be drawn again, at no memory.)
        """
        found = find(model)
        layers = [*found.layers.values(), *found.bare.values()]
        size = next(model.parameters()).element_size()
        weights = mapped(layers)
        count = sum(w.numel() for w in weights)
        parameters = sum(p.numel() for p in model.parameters()) * size
        map = defaults = 0.0
        if scheme == "partkernels":
            # A row for each partition, of biases, norms' parameters, and what a module keeps for itself.
            rows = sum(p.numel() for layer in layers for p in layer.parameters(recurse=False)) - count
            parameters += (division.count - 1) * rows * size
            bits = packed_map.bits_for(division.count)
            map = sum(w.shape[0] * packed_map.row_bytes(math.prod(w.shape[1:]), bits) for w in weights)
            defaults = count * size if division.defaults == "stored" else 0.0
        elif scheme == "paper":
            map, defaults = count, count * size
        elif scheme == "floor":
            map = count * entropy(division) / 8
        return cls(parameters, map, defaults, MOMENTS[optimizer] * parameters)


def mapped(layers: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The weights of ordinary layers that every scheme partitions entry by entry, by a map."""
    return [layer.weight for layer in layers if isinstance(layer, nn.Linear | nn.Conv2d | nn.Embedding)]


def entropy(division: Division) -> float:
    """Bits a weight that no assignment with these proportions can do without, on average.

    Example:
        >>> entropy(Division((0.5, 0.5)))
        1.0
    """
    return -sum(p * math.log2(p) for p in division.proportions if p)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
