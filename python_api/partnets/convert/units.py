"""Which units of a model are live in which subnetwork, where partitions are nested: found by runs of an example."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_leaves

from partkernels import Units
from partnets.convert.marks import Few, Runs, Seen, Spans, WithoutDropout, called
from partnets.nn.layer import PartitionedLayer
from partnets.nn.nesting import Nesting, widths
from partnets.nn.own_norm import OwnNorm, own_norm_class, unit_dim_of
from partnets.nn.own_parameters import OwnUnits
from partnets.nn.registry import rule_of
from partnets.utils.held import Held
from partnets.utils.modules import device_of, evaluating, to_device
from partnets.utils.random_state import preserved

# Units in more segments than these count as live: to compute with so many small blocks costs more than it saves.
MOST_SEGMENTS = 32

# How far numbers may be apart by rounding, over the largest of them: so many units of the precision, or so much.
FAR, LEAST = 4, 1e-5

Place = tuple[nn.Module, str]


@dataclass
class Plan:
    """How a model's layers and own parameters nest.

    Attributes:
        nestings: of the layers that do.
        own: how the parameters nest that modules keep of their own.
        norms: of those that norm units, and nest, what they become.
        why: of layers that do not, or less than they could, why, in words that follow "its".
        called: the layers that computed something.
        narrow: sets of layers, and of modules with own parameters, that can hand on their live units alone.
        makers: of each layer, those whose outputs it computes with, and the modules whose own parameters.
    """

    nestings: dict[nn.Module, Nesting] = field(default_factory=dict)
    own: dict[nn.Module, OwnUnits] = field(default_factory=dict)
    norms: dict[nn.Module, type[OwnNorm]] = field(default_factory=dict)
    why: dict[nn.Module, str] = field(default_factory=dict)
    called: set[nn.Module] = field(default_factory=set)
    narrow: list[set[nn.Module]] = field(default_factory=list)
    makers: dict[nn.Module, set[nn.Module]] = field(default_factory=dict)


def plan(
    model: nn.Module,
    layers: Collection[nn.Module],
    own: Collection[nn.Module],
    proportions: Sequence[float],
    example: Any,
    measure: str,
    apart: Collection[nn.Module] = (),
) -> Plan:
    """How the layers of an ordinary model nest, so that subnetwork k is the first units of each.

    Each layer's outputs are divided in order, but for those that are the model's. A layer's inputs have the partitions
    of what they are computed of: what is 0 of them where the units before are. The model runs some times for that and
    stays as it is: in evaluation mode, or in its own, where more layers compute in that, as auxiliary heads do.

    Args:
        layers: that have a rule.
        own: modules that keep parameters of their own.
        example, measure: see partnets.partition.
        apart: of the layers, those that are divided at random.

    Raises:
        ValueError: the model cannot be called with the example, or its outputs hide which layers they come from.
    """
    why, rules = {}, {}
    for layer in layers:
        cls = getattr(rule_of(type(layer)), "__self__", None)
        if not (isinstance(cls, type) and issubclass(cls, PartitionedLayer) and cls.unit_dim is not None):
            why[layer] = "kind of layer has no units that nest"
        elif layer in apart:
            why[layer] = "weight is that of another layer too, which has other units"
        elif not cls.can_nest(layer):
            why[layer] = "parameters are frozen in part, or its units lie in several dimensions"
        else:
            rules[layer] = cls
    noisy = [module for module in model.modules() if isinstance(module, _DropoutNd)]
    example = to_device(example, device_of(model))
    modes = [lambda: evaluating(model)]
    if model.training:
        modes.append(lambda: evaluating(*noisy))
    with _undisturbed(model):
        made = _planned(model, rules, own, proportions, example, measure, modes)
        if len(modes) > 1 and any(layer not in made.called for layer in rules):
            in_training = _planned(model, rules, own, proportions, example, measure, modes[::-1])
            if in_training.called > made.called:
                made = in_training
    made.why = {**why, **made.why}
    return made


def _planned(
    model: nn.Module,
    rules: Mapping[nn.Module, type[PartitionedLayer]],
    own: Collection[nn.Module],
    proportions: Sequence[float],
    example: Any,
    measure: str,
    modes: Sequence[Callable[[], AbstractContextManager]],
) -> Plan:
    """See plan; rules are the classes of the layers that can nest, and runs are in the first of the modes."""
    made = Plan()
    with modes[0]():
        norms = _norms(model, own, example)
    rules = {**rules, **norms}
    while True:
        runs = Runs(model, example, rules, [module for module in own if module not in rules])
        found = _Search(runs, proportions, measure, modes)
        if not (stuck := found.stuck()):
            break
        for layer in stuck:
            made.why[layer] = f"units lie in several segments, across its groups, or in more than {MOST_SEGMENTS}"
            del rules[layer]
    found.tell(made)
    made.norms = {norm: cls for norm, cls in norms.items() if norm in made.nestings}
    made.narrow = found.narrow(made)
    return made


def _norms(model: nn.Module, own: Collection[nn.Module], example: Any) -> dict[nn.Module, type[OwnNorm]]:
    """The modules with own parameters that norm units, and what they become."""
    found: dict[nn.Module, int | None] = {}

    def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        is_alone = len(tensors) == 1 and args and args[0] is tensors[0]  # a gate would have to be narrow as well
        dim = unit_dim_of(module, tensors[0]) if is_alone else None
        found[module] = dim if found.get(module, dim) == dim else None

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in own]
    try:
        with torch.no_grad():
            called(model, example)
    except Exception as error:
        raise ValueError(
            f"the model fails with example: {type(error).__name__}: {error}. Pass what it takes: a tensor, a tuple of"
            " its arguments, or a dict of them by name."
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    learning = {m for m in own if all(parameter.requires_grad for parameter in m.parameters())}
    return {
        module: own_norm_class(type(module), tuple(name for name in module._parameters), dim)
        for module, dim in found.items()
        if dim is not None and module in learning
    }


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Inside, a transformer's layers are called; afterwards the model is as before, and random states are."""
    held = Held(model, without={name for name, _ in model.named_parameters()})
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # which reads layers' weights and does not call them
    try:
        with preserved(device_of(model)), torch.enable_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        held.put_back()


class _Search:
    """What runs of an example show of a model.

    Attributes:
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

    def _tried(self, mode: Callable[[], AbstractContextManager]) -> Seen | None:
        """What a run in another mode shows; None if the model fails in it."""
        try:
            with mode(), WithoutDropout():
                return self.runs.run({}, {})
        except Exception:  # as BatchNorm does for a single example
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
            (module, name): (dims[-1], self._widths(parameter.shape[dims[-1]]))
            for (module, name), parameter in runs.own.items()
            if (dims := [dim for dim, size in enumerate(parameter.shape) if size > 1])
            and parameter.requires_grad
            and not isinstance(module, ParametrizationList)  # which other code puts together
        }
        self.own = self._own()
        own = self._values(self.own)
        self.seen = [self._run(k, own) for k in range(1, self.count)] + [self._run(None, own)]
        if self.seen[-1].is_finite and not self.seen[0].is_finite:
            raise ValueError(
                "the model's code makes numbers that are not finite of units that are 0, as where it divides by their"
                " deviation: subnetworks would compute nothing else. Keep to schemes 'weight' and 'node', or skip the"
                " layers before."
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
        return Units(tuple(self._widths(part).segments[0] for part in segments))

    def _widths(self, size: int) -> Units:
        return widths(size, self.proportions, self.measure)

    def _run(self, k: int | None, own: Mapping[Place, Tensor]) -> Seen:
        """A run of subnetwork k; of all units if None."""
        live = {} if k is None else {layer: units.owners() <= k for layer, units in self.outputs.items()}
        masked = {place: value[min(k or self.count, len(value)) - 1] for place, value in own.items()}
        return self.runs.run(live, masked)

    def _values(self, nested: Mapping[Place, tuple[int, Units]]) -> dict[Place, list[Tensor]]:
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
            some = {**absent, **self._values(group)}
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
        """The units of a layer's inputs: of the first subnetwork in which they are not 0; of 1, if they always are."""
        nonzero = [seen.nonzero.get(layer) for seen in self.seen]
        if any(one is None or one.shape != nonzero[-1].shape for one in nonzero):
            return None
        owners = torch.ones(len(nonzero[-1]), dtype=torch.int64)
        for k in range(self.count, 1, -1):
            dead = nonzero[-1] & ~torch.stack(nonzero[: k - 1]).any(0)
            owners[(dead & (owners == 1)).cpu()] = k
        return Units.of_owners(owners.tolist(), self.count)

    def narrow(self, made: Plan) -> list[set[nn.Module]]:
        """Sets of layers, and of modules with own parameters, that can hand on their live units alone.

        A model's code may count on the number of units: attention divides it by the number of heads. Whether it does
        is tried in runs of subnetworks, with random numbers in place of all that layers compute: what is given to each
        layer, and the model's outputs, must be what it is where all units are handed on. A model of which a part did
        not compute for the example has none: nobody knows what that part would do.
        """
        used = {*self.makers, *(one for makers in self.makers.values() for one in makers), *self.whole}
        known = {parameter for layer in used for parameter in layer.parameters(recurse=False)}
        learning = {module: parameter for (module, _), parameter in self.runs.own.items() if parameter.requires_grad}
        parts = {layer: list(layer.parameters(recurse=False)) for layer in self.runs.rules}
        parts |= {module: [parameter] for module, parameter in learning.items()}
        if any(layer not in used and not known.issuperset(own) for layer, own in parts.items()):
            return []
        outputs = {layer: nesting.outputs for layer, nesting in made.nestings.items()}
        own = self._values(self.own)
        tried = [(self.modes[0], k) for k in sorted({1, min(2, self.count - 1), self.count - 1})]
        tried += [(mode, 1) for mode in self.modes[1:]]

        def runs(narrow: Collection[nn.Module]) -> Iterator[Seen]:
            for mode, k in tried:
                live = {layer: units.owners() <= k for layer, units in self.outputs.items()}
                values = {place: value[k - 1] for place, value in own.items()}
                with mode(), WithoutDropout():
                    yield self.runs.run(live, values, few=Few(k, narrow, outputs, self.inputs, self.along))

        def able(layer: nn.Module) -> bool:
            if layer in self.runs.rules:
                return layer in outputs and self.runs.rules[layer].may_be_narrow(layer, outputs[layer])
            return any(module is layer for module, _ in self.along)

        sets = [one for one in _joined(self.makers.values()) if one and all(map(able, one)) and not one & self.whole]
        paths = {module: path for path, module in self.runs.model.named_modules()}
        alike: dict[tuple, list[set[nn.Module]]] = defaultdict(list)
        for one in sets:  # what has the same place in all blocks of a model is alike
            alike[
                tuple(sorted({(re.sub(r"\d+", "*", paths[layer]), repr(outputs.get(layer))) for layer in one}))
            ].append(one)
        try:
            expected = list(runs(()))
        except Exception:
            return []
        found: list[set[nn.Module]] = []

        def works(sets: list[set[nn.Module]]) -> bool:
            try:
                works = all(map(_is_same, runs(set().union(*found, *sets)), expected))
            except Exception:  # whatever a model's code raises where the sizes are not its own
                return False
            if works:
                found.extend(sets)
            return works

        for sets in alike.values():
            if not works(sets) and len(sets) > 1:
                for one in sets:
                    works([one])
        return found

    def stuck(self) -> list[nn.Module]:
        """The layers that keep units, and cannot with those that they are given."""
        return [
            layer
            for layer, rule in self.runs.rules.items()
            if (layer in self.scattered and rule.keeps_units)
            or (layer in self.inputs and not rule.can_take(layer, self.inputs[layer]))
        ]

    def tell(self, made: Plan) -> None:
        """Puts what was found into a plan."""
        for layer, rule in self.runs.rules.items():
            if layer not in self.first.nonzero:
                made.why[layer] = "parameters are read by others, or the example does not call it"
                continue
            inputs = self.inputs.get(layer)
            if layer in self.scattered:
                made.why[layer] = f"inputs lie in more than {MOST_SEGMENTS} segments"
            outputs = inputs if rule.keeps_units else self.outputs[layer]
            inner = rule.inner_units(layer)
            if all(units is None or units.is_whole for units in (inputs, outputs)) and inner is None:
                made.why.setdefault(layer, "inputs and outputs are live in all subnetworks")
                continue
            made.nestings[layer] = Nesting(outputs, inputs, None if inner is None else self._widths(inner))
        for (module, name), along in self.along.items():
            own = made.own.get(module, OwnUnits({}, ()))
            nested = (*own.nested, name) if (module, name) in self.own else own.nested
            made.own[module] = OwnUnits({**own.along, name: along}, nested)
        made.makers, made.called = self.makers, set(self.first.nonzero)


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


def _joined(sets: Iterable[set[nn.Module]]) -> list[set[nn.Module]]:
    """Sets with all that have something in common put together."""
    joined: list[set[nn.Module]] = []
    for new in sets:
        touching = [one for one in joined if one & new]
        joined = [one for one in joined if not one & new]
        joined.append(new.union(*touching))
    return joined


def _is_same(one: Seen, other: Seen) -> bool:
    """Whether layers were given the same in two runs, and the outputs are."""
    return len(one.computed) == len(other.computed) and all(
        a is b and x.shape == y.shape and _is_near(x, y)
        for (a, x), (b, y) in zip(one.computed, other.computed, strict=True)
    )


def _is_near(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors differ by rounding alone: in sums over another number of units, most of them 0."""
    if not y.numel():
        return True
    most = max(FAR * torch.finfo(y.dtype).eps, LEAST) * float(y.abs().max())
    return float((x - y).abs().max()) <= most
