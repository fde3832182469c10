"""Runs of a model in which marks take the place of what layers compute: they show where it goes, and what of it."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from partkernels import Units
from partnets.nn.layer import PartitionedLayer
from partnets.nn.registry import rule_of
from partnets.utils.contained import has_numbers, is_lazy, tensors
from partnets.utils.copied import copied
from partnets.utils.modules import hooked


def called(model: nn.Module, example: Any) -> Any:
    """What a model makes of an example: of its argument, a tuple of its arguments, or a mapping of them by name.

    It gets a copy: some write into what they are given.

    Raises:
        ValueError: it returns an iterator, whose layers compute when somebody asks.
    """
    example = copied(example)
    if isinstance(example, Mapping):
        output = model(**example)
    else:
        output = model(*example) if isinstance(example, tuple) else model(example)
    if is_lazy(output):
        raise ValueError(
            f"the model returns a {type(output).__name__}, whose layers compute when somebody asks; return a list."
        )
    return output


def results(output: Any) -> list[Tensor]:
    """The tensors of real and complex numbers in what a model has computed, but for caches of keys and values."""
    return [one for one in tensors(output, caches=False) if not is_whole(one)]


def is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is of whole numbers, or of choices."""
    return not (tensor.is_floating_point() or tensor.is_complex())


class Misfit(Exception):
    """Units do not fit where they are given."""


@dataclass
class Seen:
    """What a run has shown.

    Attributes:
        nonzero: of each layer that was called, which units of its inputs were not 0; None if nobody can tell.
        makers: of each, the layers whose outputs it was given, and the modules whose own parameters.
        whole: the layers whose outputs are the model's.
        results: where the model's outputs are not 0.
        is_finite: whether all that layers were given was.
        computed: what layers were given, of live units alone, call by call; and the model's outputs. Whole numbers too.
    """

    nonzero: dict[nn.Module, Tensor | None] = field(default_factory=dict)
    makers: dict[nn.Module, set[nn.Module]] = field(default_factory=dict)
    whole: set[nn.Module] = field(default_factory=set)
    results: list[Tensor] = field(default_factory=list)
    computed: list[tuple[nn.Module | None, Tensor]] = field(default_factory=list)
    is_finite: bool = True

    def visit(self, layer: nn.Module, inputs: list[Tensor], makers: set[nn.Module], dim: int) -> None:
        """Notes what a layer is called with."""
        self.makers.setdefault(layer, set()).update(makers)
        for x in inputs:
            self.is_finite &= bool(x.isfinite().all())
            self._note(layer, units_of(x, dim))

    def include(self, other: Seen) -> None:
        """Adds what layers were given in another run."""
        for layer, found in other.nonzero.items():
            self._note(layer, found)

    def _note(self, layer: nn.Module, found: Tensor | None) -> None:
        before = self.nonzero.get(layer, found)
        alike = before is not None and found is not None and before.shape == found.shape
        self.nonzero[layer] = before | found if alike else None


def units_of(x: Tensor, dim: int) -> Tensor | None:
    """At which units along a dimension there is something; None if there is no such dimension."""
    if not -x.dim() <= dim < x.dim():
        return None
    return (x.detach() != 0).movedim(dim, -1).flatten(0, -2).any(0) if x.dim() > 1 else x.detach() != 0


class _Mark(torch.autograd.Function):
    """Values in place of what a layer computed; the graph that they are in tells where they have gone.

    Of no layer in particular, it is a step on the way from those before.
    """

    @staticmethod
    def forward(ctx: Any, layer: nn.Module | None, values: Tensor, *after: Tensor) -> Tensor:
        ctx.layer = layer
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        raise RuntimeError("marks have no gradients.")


def _makers(
    given: Iterable[Tensor], owners: Mapping[int, nn.Module], through: Collection[nn.Module] = ()
) -> set[nn.Module]:
    """The layers of whose marks tensors are computed; of some, `through`, also those before.

    Args:
        owners: of parameters, by their ids, the modules that read them as their own: these are found as well.
    """
    return _makers_of([one.grad_fn for one in given if one.grad_fn is not None], owners, through)


def _makers_of(nodes: Iterable[Any], owners: Mapping[int, nn.Module], through: Collection[nn.Module]) -> set[nn.Module]:
    """See _makers; from nodes of a graph on."""
    found, seen, front = set(), set(), list(nodes)
    while front:
        node = front.pop()
        if node in seen:
            continue
        seen.add(node)
        is_mark = isinstance(node, _Mark._backward_cls)
        layer = node.layer if is_mark else owners.get(id(getattr(node, "variable", None)))
        if layer is not None:
            found.add(layer)
        if not is_mark or layer is None or layer in through:
            front += [before for before, _ in node.next_functions if before is not None]
    return found


class Spans(TorchDispatchMode):
    """Notes with which parts of marks a model computes apart: queries, keys and values are three of one layer's."""

    def __init__(self) -> None:
        super().__init__()
        self._marks: dict[int, tuple[nn.Module, Tensor, int]] = {}
        self._spans: dict[nn.Module, set[tuple[int, int]]] = defaultdict(set)

    def watch(self, layer: nn.Module, y: Tensor, dim: int) -> None:
        self._marks[y.untyped_storage().data_ptr()] = layer, y, dim

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            for tensor in tree_leaves((args, kwargs)):
                if (
                    isinstance(tensor, Tensor)
                    and tensor.layout == torch.strided
                    and tensor.numel()
                    and not tensor.is_meta
                ):
                    self._note(tensor)
        return result

    def _note(self, tensor: Tensor) -> None:
        layer, y, dim = self._marks.get(tensor.untyped_storage().data_ptr(), (None, None, 0))
        if layer is None:
            return
        size, unit = y.shape[dim], y.stride(dim)
        # Steps shorter than a unit, and those over all units, do not lead from one unit to another.
        steps = [
            (number - 1) * (step // unit)
            for number, step in zip(tensor.shape, tensor.stride(), strict=True)
            if unit <= step < unit * size
        ]
        first = tensor.storage_offset() // unit % size
        self._spans[layer].add((first, min(first + sum(steps) + 1, size)))

    def segments(self, layer: nn.Module, size: int) -> list[int]:
        """The sizes of the parts of its outputs that the model computes with apart.

        Example:
            >>> spans = Spans()
            >>> layer, y = nn.Identity(), torch.ones(2, 6)
            >>> spans.watch(layer, y, -1)
            >>> with spans:
            ...     first, second, third = y.chunk(3, -1)
            ...     _ = first * second + third.exp()
            >>> spans.segments(layer, 6)
            [2, 2, 2]
        """
        starts, end = [0], 0
        for first, last in sorted(self._spans[layer]):
            if first >= end > 0:
                starts.append(first)
            end = max(end, last)
        return [b - a for a, b in zip(starts, [*starts[1:], size], strict=True)]


@dataclass
class Few:
    """Which layers hand on their live units alone, in a run of one subnetwork.

    Attributes:
        active: k.
        narrow: the layers that do, and the modules with own parameters that do.
        outputs, inputs: the units of layers.
        along: of own parameters, along which dimension they have units, and these.
        taking: the layers that were given live units alone.
    """

    active: int
    narrow: Collection[nn.Module]
    outputs: Mapping[nn.Module, Units]
    inputs: Mapping[nn.Module, Units]
    along: Mapping[tuple[nn.Module, str], tuple[int, Units]]
    taking: set[nn.Module] = field(default_factory=set)

    def handed_on(self, layer: nn.Module, values: Tensor, dim: int, units: Units) -> Tensor:
        """What a layer hands on of all its units' values."""
        return units.take(values, dim, self.active) if layer in self.narrow else values

    def taken(self, layer: nn.Module, x: Tensor, rule: type[PartitionedLayer]) -> Tensor:
        """All inputs of a layer that is given them or the live ones alone.

        Raises:
            Misfit: it is given others, or cannot take these alone.
        """
        units = self.inputs.get(layer)
        if units is None or x.shape[rule.unit_dim] == units.size:
            return x
        if x.shape[rule.unit_dim] != units.number(self.active) or not rule.may_take_few(layer, units):
            raise Misfit
        self.taking.add(layer)
        return units.spread(x, rule.unit_dim, self.active)

    def live(self, layer: nn.Module, x: Tensor, rule: type[PartitionedLayer]) -> Tensor:
        units = self.inputs.get(layer)
        return (x if units is None else units.take(x, rule.unit_dim, self.active)).detach()


def _replaced(value: Any, new: Mapping[int, Tensor]) -> Any:
    """A container of arguments with tensors replaced, which are known by their ids."""
    return tree_map(lambda leaf: new.get(id(leaf), leaf), value)


class WithoutDropout(TorchFunctionMode):
    """Functional dropout, which would drop other units where there are fewer, does nothing."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in DROPOUTS:
            return args[0] if args else kwargs["input"]
        return function(*args, **(kwargs or {}))


DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout}


class Cut(TorchFunctionMode):
    """Remembers of what is computed without a graph: the largest of some numbers, what is detached, a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self._before: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._left: set[Any] = set()
        self._is_off = False

    def without(self, function: Callable) -> Callable:
        """A function of which nothing is remembered."""

        def called(*args: Any) -> Any:
            self._is_off = True
            try:
                return function(*args)
            finally:
                self._is_off = False

        return called

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if self._is_off:
            return result
        name = getattr(function, "__name__", "")
        ends = [one for one in tensors(result) if one.grad_fn is None and not one.requires_grad]
        if not ends and name not in LEAVING:
            return result
        before = set()
        for one in tensors((args, kwargs)):
            before |= {one.grad_fn} if one.grad_fn is not None else self._before.get(one, set())
        if name in LEAVING:
            self._left |= before
        elif before:
            for one in ends:
                self._before[one] = self._before.get(one, set()) | before
        return result

    def makers(self, output: Any, owners: Mapping[int, nn.Module], through: Collection[nn.Module]) -> set[nn.Module]:
        """The layers of which an output's tensors without a graph are computed, and its numbers that are no tensors."""
        nodes = {node for one in tensors(output, caches=False) for node in self._before.get(one, ())}
        return _makers_of(nodes | (self._left if has_numbers(output) else set()), owners, through)


# Functions that make of a tensor what is none.
LEAVING = {"numpy", "tolist", "item", "__array__", "__bool__", "__float__", "__int__", "__index__"}


class OfOne(TorchFunctionMode):
    """Notes of which layers' outputs a softmax over one number is made: it is 1, and hides what they are multiplied by.

    Args:
        through: see _makers.

    Attributes:
        makers: the layers.
    """

    def __init__(self, through: Collection[nn.Module]) -> None:
        super().__init__()
        self.through = through
        self.makers: set[nn.Module] = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function is F.scaled_dot_product_attention:
            given = [*args, *kwargs.values()][:2]  # queries and keys
            over = given[1].shape[-2]
        elif function in SOFTMAXES:
            given, dim = [result], kwargs.get("dim", args[1] if len(args) > 1 else None)
            over = result.shape[-1 if dim is None else dim]
        else:
            return result
        if over == 1:
            self.makers |= _makers(given, {}, self.through)
        return result


SOFTMAXES = {F.softmax, torch.softmax, Tensor.softmax, F.log_softmax, torch.log_softmax, Tensor.log_softmax}


# Ranges of random numbers: activations pass positive ones on, and stop or are flat for others.
POSITIVE, NEGATIVE, SMALL = (0.5, 1.5), (-1.5, -0.5), (-0.1, 0.1)


class Runs:
    """A model's runs of an example, in which marks take the place of what layers compute.

    Of layers that do not nest too, as frozen ones: all of their units are live, also those that are 0 for this example.

    Args:
        model: an ordinary one.
        example: see `called`.
        rules: of each layer that can nest, its class of partnets.
        own: modules that read parameters of their own.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        rules: Mapping[nn.Module, type[PartitionedLayer]],
        own: Collection[nn.Module],
    ) -> None:
        self.model, self.example, self.rules = model, example, rules
        self.own = {
            (module, name): parameter
            for module in own
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.is_floating_point()
        }
        self._others = set(_outermost(model, rules))
        self._results: dict[tuple, Tensor] = {}

    def run(
        self,
        live: Mapping[nn.Module, Tensor],
        own: Mapping[tuple[nn.Module, str], Tensor],
        spans: Spans | None = None,
        few: Few | None = None,
        example: Any = None,
        between: tuple[float, float] = POSITIVE,
    ) -> Seen:
        """Runs the example.

        Args:
            live: of layers that make units, which of these are live; of others all are. Norms keep those of inputs.
            own: values of own parameters, by module and name; others are random numbers.
            spans: notes which parts of the layers' outputs are computed with apart.
            few: which layers hand on their live units alone, and which units these are.
            example: another one.
            between: the least and the largest of the numbers.
        """
        seen, random = Seen(), torch.Generator().manual_seed(0)

        def numbers(like: Tensor) -> Tensor:
            return (
                torch.empty(like.shape, device="cpu").uniform_(*between, generator=random).to(like.device, like.dtype)
            )

        values = {place: own.get(place, numbers(parameter)) for place, parameter in self.own.items()}
        if few is not None:
            values |= {place: few.handed_on(place[0], values[place], *along) for place, along in few.along.items()}
        values = {place: nn.Parameter(value.to(self.own[place])) for place, value in values.items()}
        owners = {id(value): module for (module, _), value in values.items()}
        start, cut = torch.ones((), requires_grad=True, device="cpu"), Cut()

        def given(layer: nn.Module, args: tuple, kwargs: dict) -> list[Tensor]:
            return results((args, kwargs))[: self.rules[layer].unit_inputs]

        def before(layer: nn.Module, args: tuple, kwargs: dict) -> tuple | None:
            inputs = given(layer, args, kwargs)
            if few is not None:  # an ordinary layer takes all units
                whole = [few.taken(layer, x, self.rules[layer]) for x in inputs]
                seen.computed += [(layer, few.live(layer, x, self.rules[layer])) for x in whole]
                seen.computed += [(layer, ids) for ids in tensors((args, kwargs), caches=False) if is_whole(ids)]
                args, kwargs = _replaced((args, kwargs), dict(zip(map(id, inputs), whole, strict=True)))
                return args, kwargs
            seen.visit(layer, inputs, _makers(inputs, owners), self.rules[layer].unit_dim)
            seen.nonzero.setdefault(layer, None)
            return None

        def of_another(layer: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
            y = output[0] if isinstance(output, tuple) else output
            if not isinstance(y, Tensor) or is_whole(y):
                return output
            marks = _Mark.apply(None, numbers(y), start, *results((args, kwargs)))
            return (marks, *output[1:]) if isinstance(output, tuple) else marks

        def after(layer: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
            y, rule = output[0] if isinstance(output, tuple) else output, self.rules[layer]
            mask, inputs = live.get(layer), [start]
            if rule.keeps_units:
                inputs = given(layer, args, kwargs)
                mask = units_of(inputs[0], rule.unit_dim)
            marks = numbers(y)
            if mask is not None:
                marks = marks * mask.to(marks).view(-1, *[1] * (y.dim() - rule.unit_dim % y.dim() - 1))
            if few is not None and layer in few.outputs:
                marks = few.handed_on(layer, marks, rule.unit_dim, few.outputs[layer])
            marks = _Mark.apply(layer, marks, *inputs)
            if spans is not None and not rule.keeps_units:
                spans.watch(layer, marks, rule.unit_dim)
            return (marks, *output[1:]) if isinstance(output, tuple) else marks

        try:
            for (module, name), value in values.items():
                module._parameters[name] = value
            torch.manual_seed(0)
            with (
                hooked(self.rules, cut.without(before), cut.without(after)),
                hooked(self._others, after=cut.without(of_another)),
                self._knowing(),
                spans or contextlib.nullcontext(),
                cut if few is None and not live else contextlib.nullcontext(),  # what all units show is enough
            ):
                output = called(self.model, self.example if example is None else example)
        finally:
            for (module, name), parameter in self.own.items():
                module._parameters[name] = parameter
        leaves = results(output)
        norms = [layer for layer, rule in self.rules.items() if rule.keeps_units]
        seen.whole = _makers(leaves, owners, norms) | cut.makers(output, owners, norms)
        seen.computed += [(None, one.detach()) for one in tensors(output, caches=False)]
        seen.results = [leaf.detach() != 0 for leaf in leaves]
        return seen

    @contextlib.contextmanager
    def _knowing(self) -> Iterator[None]:
        """Inside, torch's layers compute for inputs of the same shapes once: marks take the place of what they give."""
        layers = [
            layer
            for layer in (*self.rules, *self._others)
            if "forward" not in vars(layer) and _is_of_torch(type(layer).forward)
        ]

        def knowing(layer: nn.Module) -> Callable:
            def forward(*args: Any, **kwargs: Any) -> Any:
                if kwargs or not all(isinstance(one, Tensor) for one in args):
                    return type(layer).forward(layer, *args, **kwargs)
                place = (layer, layer.training, *((one.shape, one.dtype) for one in args))
                if place not in self._results:
                    y = type(layer).forward(layer, *args)
                    if not isinstance(y, Tensor):
                        return y
                    self._results[place] = y.detach().new_zeros(()).expand(y.shape)
                return self._results[place]

            return forward

        try:
            for layer in layers:
                vars(layer)["forward"] = knowing(layer)
            yield
        finally:
            for layer in layers:
                del vars(layer)["forward"]


def _outermost(module: nn.Module, rules: Collection[nn.Module]) -> Iterator[nn.Module]:
    """The layers in a module for which there is a rule, but for some, and what is in them."""
    if module in rules:
        return
    if rule_of(type(module)) is not None:
        yield module
        return
    for child in module.children():
        yield from _outermost(child, rules)


def _is_of_torch(function: Callable) -> bool:
    return (function.__module__ or "").startswith("torch.nn.modules.")
