"""plan: how a model's layers and own parameters nest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from partnets.convert.marks import Runs, called
from partnets.convert.narrowing import can_be_narrow
from partnets.convert.units import MOST_SEGMENTS, Search
from partnets.nn.layer import PartitionedLayer
from partnets.nn.nesting import Nesting
from partnets.nn.own_norm import OwnNorm, own_norm_class, unit_dim_of
from partnets.nn.own_parameters import OwnUnits
from partnets.nn.registry import rule_of
from partnets.utils.held import Held
from partnets.utils.modules import device_of, evaluating, hooked, to_device, training_quietly
from partnets.utils.random_state import preserved


@dataclass
class Plan:
    """How a model's layers and own parameters nest.

    Attributes:
        nestings: of the layers that do.
        own: how the parameters nest that modules keep of their own.
        norms: of those that norm units, and nest, what they become.
        why: of layers that do not, or less than they could, why, in words that follow "its".
        narrow: sets of layers, and of modules with own parameters, that can hand on their live units alone.
        taking: the layers that take live units alone where all of those can.
        makers: of each layer, those whose outputs it computes with, and the modules whose own parameters.
    """

    nestings: dict[nn.Module, Nesting] = field(default_factory=dict)
    own: dict[nn.Module, OwnUnits] = field(default_factory=dict)
    norms: dict[nn.Module, type[OwnNorm]] = field(default_factory=dict)
    why: dict[nn.Module, str] = field(default_factory=dict)
    narrow: list[set[nn.Module]] = field(default_factory=list)
    taking: set[nn.Module] = field(default_factory=set)
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
    example = to_device(example, device_of(model))
    modes = [lambda: evaluating(model), lambda: training_quietly(model)]
    with _undisturbed(model) as held:
        try:
            made = _planned(model, rules, own, proportions, example, measure, modes, held)
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                "the model runs with example, but not where numbers without a derivative take the place of what its"
                f" layers compute, as nested units are found: {type(error).__name__}: {error}. If it differentiates"
                " inside of its forward, keep to schemes 'weight' and 'node'."
            ) from error
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
    held: Held,
) -> Plan:
    """See plan; rules are the classes of the layers that can nest, and runs are in the first of the modes.

    If more layers are called in the other, that becomes the first.
    """
    made = Plan()
    with modes[0]():
        norms = _norms(model, own, example)
    nesting = {**rules, **norms}
    while True:
        runs = Runs(model, example, nesting, [module for module in own if module not in nesting])
        found = Search(runs, proportions, measure, modes)
        if found.has_more_elsewhere:  # which then has no more of them here
            held.put_back()
            return _planned(model, rules, own, proportions, example, measure, modes[::-1], held)
        if not (stuck := found.stuck()):
            break
        for layer in stuck:
            made.why[layer] = f"units lie in several segments, across its groups, or in more than {MOST_SEGMENTS}"
            del nesting[layer]
    _tell(made, found)
    made.norms = {norm: cls for norm, cls in norms.items() if norm in made.nestings}
    held.put_back()
    made.narrow, made.taking = can_be_narrow(found, made.nestings)
    return made


def _tell(made: Plan, found: Search) -> None:
    """Puts what was found into a plan."""
    for layer, rule in found.runs.rules.items():
        if layer not in found.first.nonzero:
            made.why[layer] = "parameters are read by others, or the example does not call it"
            continue
        inputs = found.inputs.get(layer)
        if layer in found.scattered:
            made.why[layer] = f"inputs lie in more than {MOST_SEGMENTS} segments"
        outputs = inputs if rule.keeps_units else found.outputs[layer]
        inner = rule.inner_units(layer)
        if all(units is None or units.is_whole for units in (inputs, outputs)) and inner is None:
            made.why.setdefault(layer, "inputs and outputs are live in all subnetworks")
            continue
        made.nestings[layer] = Nesting(outputs, inputs, None if inner is None else found.widths(inner))
    for (module, name), along in found.along.items():
        own = made.own.get(module, OwnUnits({}, ()))
        nested = (*own.nested, name) if (module, name) in found.own else own.nested
        made.own[module] = OwnUnits({**own.along, name: along}, nested)
    made.makers = found.makers


def _norms(model: nn.Module, own: Collection[nn.Module], example: Any) -> dict[nn.Module, type[OwnNorm]]:
    """The modules with own parameters that norm units, and what they become."""
    found: dict[nn.Module, int | None] = {}

    def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        is_alone = len(tensors) == 1 and args and args[0] is tensors[0]  # a gate would have to be narrow as well
        dim = unit_dim_of(module, tensors[0]) if is_alone else None
        found[module] = dim if found.get(module, dim) == dim else None

    try:
        with hooked(own, note), torch.no_grad():
            called(model, example)
    except Exception as error:
        raise ValueError(
            f"the model fails with example: {type(error).__name__}: {error}. Pass what it takes: a tensor, a tuple of"
            " its arguments, or a dict of them by name."
        ) from error
    learning = {m for m in own if all(parameter.requires_grad for parameter in m.parameters())}
    return {
        module: own_norm_class(type(module), tuple(name for name in module._parameters), dim)
        for module, dim in found.items()
        if dim is not None and module in learning
    }


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[Held]:
    """Inside, a transformer's layers are called; afterwards the model is as before, and random states are.

    Gives what the model held before.
    """
    held = Held(model)  # parameters too: a model's own code may write into them, as LoRA's train() does
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # which reads layers' weights and does not call them
    try:
        with preserved(device_of(model)), torch.enable_grad():
            yield held
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        held.put_back()
