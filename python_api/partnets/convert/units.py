"""Which units of a model are live in which subnetwork, where partitions are nested: what runs of an example show."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from partkernels import Units
from partnets.convert.marks import NEGATIVE, POSITIVE, Runs, Seen, Spans, WithoutDropout
from partnets.nn import nesting
from partnets.nn.layer import PartitionedLayer
from partnets.utils.modules import evaluating

# Units in more segments than these count as live: to compute with so many small blocks costs more than it saves.
MOST_SEGMENTS = 32

Place = tuple[nn.Module, str]


class Search:
    """What runs of an example show of a model.

    Attributes:
        makers: of each layer, those whose outputs it computes with, and the modules whose own parameters.
        whole: the layers whose outputs are the model's.
        has_more_elsewhere: whether layers are called in another mode that are not in the first one.
        outputs: of each layer that makes units, its own.
        inputs: of each layer, the units of its inputs; those that nobody knows are left out.
        along: of own parameters, along which dimension they may have units, and which these would be.
        own: of those that nest, the same.
    """

    def __init__(
        self,
        runs: Runs,
        proportions: Sequence[float],
        measure: str,
        modes: Sequence[Callable[[], AbstractContextManager]],
    ) -> None:
        self.runs, self.proportions, self.measure, self.modes = runs, proportions, measure, modes
        self.count = len(proportions)
        others = [seen for mode in modes[1:] if (seen := self._tried(mode)) is not None]
        with modes[0](), WithoutDropout():
            self._look(others)
        self.has_more_elsewhere = any(seen.nonzero.keys() > self.first.nonzero.keys() for seen in others)

    def _tried(self, mode: Callable[[], AbstractContextManager]) -> Seen | None:
        """What a run in another mode shows; None if the model fails in it, also with batch norms in evaluation."""
        norms = [module for module in self.runs.model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        for still in ((), norms):  # which fail for a single example
            with contextlib.suppress(Exception), mode(), evaluating(*still), WithoutDropout():
                return self.runs.run({}, {})
        return None

    def _look(self, others: Sequence[Seen]) -> None:
        runs = self.runs
        self.first = runs.run({}, {}, spans := Spans())
        self.makers = _united([self.first, *others])
        self.whole = _made_for_nobody(self.makers, runs.rules).union(*(seen.whole for seen in (self.first, *others)))
        self.outputs = {
            layer: self._outputs(layer, spans)
            for layer, rule in runs.rules.items()
            if layer in self.first.nonzero and not rule.keeps_units
        }
        self.along = {
            (module, name): (dims[-1], self.widths(parameter.shape[dims[-1]]))
            for (module, name), parameter in runs.own.items()
            if (dims := [dim for dim, size in enumerate(parameter.shape) if size > 1])
            and parameter.requires_grad
            and not isinstance(module, ParametrizationList)  # which other code puts together
        }
        self.own = self._own()
        own = self.values(self.own)
        self.seen = [self._run(k, own) for k in range(1, self.count)] + [self._run(None, own)]
        for k, seen in enumerate(self.seen[:-1], 1):  # a sort has zeros after numbers below 0
            seen.include(self._run(k, own, NEGATIVE))
        if self.seen[-1].is_finite and not self.seen[0].is_finite:
            raise ValueError(
                "the model's code makes numbers that are not finite of units that are 0, as where it divides by their"
                " deviation, or by parameters of their own: subnetworks would compute nothing else. Keep to schemes"
                " 'weight' and 'node', or skip the layers before."
            )
        if not all(map(torch.equal, self.seen[0].results, self.seen[-1].results)):
            raise ValueError(
                "the model's outputs have entries that are 0 in subnetwork 1, and hide of which layers they are"
                " computed, as those do that are detached: return them with their graph, or leave the last layers out"
                " with skip=."
            )
        self.inputs: dict[nn.Module, Units] = {}
        self.scattered: set[nn.Module] = set()
        for layer in self.first.nonzero:
            units = self._inputs(layer)
            if units is not None and len(units.segments) > MOST_SEGMENTS:
                self.scattered.add(layer)
            elif units is not None:
                self.inputs[layer] = units

    def _outputs(self, layer: nn.Module, spans: Spans) -> Units:
        """A layer's own units: each part that the model computes with apart is divided by the proportions."""
        size = self.runs.rules[layer].made_units(layer)
        if layer in self.whole:
            return Units.whole(size, self.count)
        segments = spans.segments(layer, size)
        return Units(tuple(self.widths(part).segments[0] for part in segments))

    def widths(self, size: int) -> Units:
        return nesting.widths(size, self.proportions, self.measure)

    def _run(self, k: int | None, own: Mapping[Place, Tensor], between: tuple[float, float] = POSITIVE) -> Seen:
        """A run of subnetwork k; of all units if None."""
        live = {} if k is None else {layer: units.owners() <= k for layer, units in self.outputs.items()}
        masked = {place: value[min(k or self.count, len(value)) - 1] for place, value in own.items()}
        return self.runs.run(live, masked, between=between)

    def values(self, nested: Mapping[Place, tuple[int, Units]]) -> dict[Place, list[Tensor]]:
        """Of own parameters that nest, random numbers where they are live in subnetwork 1..C."""
        values = {}
        for place, (dim, units) in nested.items():
            parameter = self.runs.own[place]
            numbers = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1)).to(parameter) + 0.5
            shape = [-1, *[1] * (parameter.dim() - dim - 1)]
            owners = units.owners(parameter.device).view(shape)
            values[place] = [numbers * (owners <= k) for k in range(1, self.count + 1)]
        return values

    def _own(self) -> dict[Place, tuple[int, Units]]:
        """The own parameters that nest.

        That are those that are added to units which would be live all of them else, as position embeddings are: with a
        parameter of which subnetwork 1 has the first units, a run shows what it does with zeros in its place, and with
        all of the parameter more is live.
        """
        alike: dict[tuple[type, str], dict[Place, tuple[int, Units]]] = defaultdict(dict)
        for (module, name), along in self.along.items():
            alike[type(module), name][module, name] = along
        absent = {place: [torch.zeros_like(self.runs.own[place])] for group in alike.values() for place in group}
        nested, without = {}, self._pattern(absent) if alike else []
        for group in alike.values():
            some = {**absent, **self.values(group)}
            all_of_it = {place: value for place, value in absent.items() if place not in group}
            with_units, with_all = self._pattern(some), self._pattern(all_of_it)
            if _alike(with_units, without) and not _alike(without, with_all):
                nested |= group
                absent, without = some, with_units
            else:
                absent, without = all_of_it, with_all
        return nested

    def _pattern(self, own: Mapping[Place, list[Tensor]]) -> list[Tensor | None]:
        """Where each layer's inputs, and the model's outputs, are 0 in subnetwork 1 and not always."""
        one, every = self._run(1, own), self._run(None, own)
        pairs = [(one.nonzero.get(layer), after) for layer, after in every.nonzero.items()]
        pairs += zip(one.results, every.results, strict=True)
        unknown = [a is None or b is None or a.shape != b.shape for a, b in pairs]
        return [None if skip else b & ~a for skip, (a, b) in zip(unknown, pairs, strict=True)]

    def _inputs(self, layer: nn.Module) -> Units | None:
        """The units of a layer's inputs: of the first subnetwork in which they are not 0; of 1, if they always are.

        None where nobody knows: where some subnetworks show nothing of them.
        """
        nonzero = [seen.nonzero.get(layer) for seen in self.seen]
        if any(one is None or one.shape != nonzero[-1].shape for one in nonzero):
            return None
        if nonzero[-1].any() and not all(one.any() for one in nonzero):
            return None  # as an expert to which a run of a subnetwork gives no example
        owners = torch.ones(len(nonzero[-1]), dtype=torch.int64, device="cpu")
        for k in range(self.count, 1, -1):
            dead = nonzero[-1] & ~torch.stack(nonzero[: k - 1]).any(0)
            owners[dead.cpu() & (owners == 1)] = k
        return Units.of_owners(owners.tolist(), self.count)

    def stuck(self) -> list[nn.Module]:
        """The layers that keep units, and cannot with those that they are given."""
        return [
            layer
            for layer, rule in self.runs.rules.items()
            if (layer in self.scattered and rule.keeps_units)
            or (layer in self.inputs and not rule.can_take(layer, self.inputs[layer]))
        ]


def _alike(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _united(runs: Sequence[Seen]) -> dict[nn.Module, set[nn.Module]]:
    """Of each layer, those whose outputs it computes with in any of some runs; of the first run's layers first."""
    return {
        layer: set().union(*(seen.makers.get(layer, ()) for seen in runs))
        for layer in dict.fromkeys(layer for seen in runs for layer in seen.makers)
    }


def _made_for_nobody(
    makers: Mapping[nn.Module, set[nn.Module]], rules: Mapping[nn.Module, type[PartitionedLayer]]
) -> set[nn.Module]:
    """The layers with whose outputs no other layer computes: they must be the model's, whatever becomes of them."""
    heard = set().union(*makers.values())
    found = {layer for layer in makers if layer not in heard}
    front = [layer for layer in found if rules[layer].keeps_units]
    while front:  # of a norm's outputs the units are those that it is given
        for layer in makers.get(front.pop(), set()) - found:
            found.add(layer)
            front += [layer] if layer in rules and rules[layer].keeps_units else []
    return found
