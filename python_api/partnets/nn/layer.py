"""PartitionedLayer: torch's layers, each of whose parameters is divided among the partitions."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from partkernels import Defaults, NestedPartition, Normal, Partition, Stored, Uniform, Units, Zeros, subnetwork_weight
from partkernels.arguments import sizes
from partnets.nn import partition_format
from partnets.nn.activation_checkpoint import same_subnetwork
from partnets.nn.cumulative import live_product, live_sum, raise_without_rows, with_rows
from partnets.nn.initial_values import Distribution, Start, declared, distribution_of, fill
from partnets.nn.nesting import LiveUnits, Nesting, no_defaults, of_live, widths
from partnets.nn.partitioned import Partitioned, as_class, check_parameters
from partnets.nn.registry import register, rule_of
from partnets.nn.shown import show
from partnets.nn.state_dict import refuse_unfit, unfit_tensors
from partnets.utils import seeds
from partnets.utils.modules import is_sharded

# The default's stream 0 fills a weight; a shift draws from another, so that the two are independent.
SHIFT_STREAM = 1

SCHEMES = ("weight", "node", "nested")

# What a state_dict calls the fingerprint of the chunks.
LEARNED_FROM = "learned_from"
# And what it has learned from before its first step; UNKNOWN is an empty text.
NOTHING = "nothing"
PARTITION_OF = "_partition"


# Inside of `watching`, what reading gave: a layer, the name of a parameter, its live value, and a copy of that.
_read: list[tuple[nn.Module, str, Tensor, Tensor]] | None = None


@contextmanager
def watching() -> Iterator[list[tuple[nn.Module, str, Tensor, Tensor]]]:
    """Inside, whoever reads a live parameter as an attribute is noted, so that writing into it is seen."""
    global _read
    _read = found = []
    try:
        yield found
    finally:
        _read = None


class PartitionedLayer(Partitioned):
    """A mixin for torch's layers, whose parameters are of three kinds.

    - weights: each entry belongs to a partition, and where that is not live it has its default (Section 3).
    - shifts: a row for each partition, of which subnetwork k adds up the first k, b_1 + ... + b_k (Appendix I.2).
    - scales: a row for each partition, of which it multiplies the first k, s_1 * ... * s_k.

    Put it before torch's layer among the bases, name that layer in `ordinary` and its parameters in `weights`, `shifts`
    and `scales`, and compute with `self.compute` or `self.live`, as partnets.Linear and GroupNorm do. A shift or scale
    is [C, ...]; its first row starts at the ordinary layer's value and the others at 0 or 1, so that all subnetworks
    start alike. With C = 1 parameters and state_dict are torch's.

    Args:
        *args, **kwargs: as torch's layer takes them.
        proportions: C numbers that sum to 1, the share of each weight's entries in each partition.
        seed: an int in [0, 2**63) that decides the partitions and, with 'seed', the initial values; None draws one from
            torch's global generator.
        defaults: of entries that are not live; see partnets.partition. None is 'seed', or 'zero' for nested partitions.
        scheme: 'weight', 'node' or 'nested', which makes all inputs live; see partnets.partition.

    Attributes:
        partitions: of each weight, by its name. Of nested ones also of each shift and scale, which has an entry for
            each unit then, and no rows.
        partition: that of the parameter `weight`.
        nesting: which inputs and outputs are live, if partitions are nested; else None.
        is_narrow, takes_narrow: whether the outputs, and the inputs, are the live ones alone, of nested partitions;
            else they are all, the others 0.
        whole_because: why it is not nested, or less than it could be, in a model whose partitions are; else None.
        seed_defaults: how a layer starts that is drawn from a seed, if not as it is now; see partnets.partition.
        count, active, update: see Partitioned.
    """

    ordinary: type[nn.Module]
    weights: Sequence[str] = ()
    shifts: Sequence[str] = ()
    scales: Sequence[str] = ()
    # What a state_dict has of this layer beside tensors and partitions, where it is known, and of which type.
    notes: ClassVar[Mapping[str, type]] = {LEARNED_FROM: str}
    seed_defaults: Defaults | Callable[..., Defaults] | None = None
    # How parameters started that torch starts otherwise, and their partition does not say: those of to_fresh do again.
    starts: Mapping[str, Start] = MappingProxyType({})
    partitions: dict[str, Partition]
    # Which dimension of inputs and outputs has the units that nested partitions divide; None of what they can't.
    unit_dim: ClassVar[int | None] = None
    # What torch's layer calls the numbers of its inputs, if it has some, and of its outputs.
    unit_names: ClassVar[Sequence[str]] = ()
    # How many of the inputs have units: queries, keys and values do.
    unit_inputs: ClassVar[int] = 1
    # Whether a unit of the outputs comes of the same unit of the inputs alone, as norms have it.
    keeps_units: ClassVar[bool] = False
    nesting: Nesting | None = None
    is_narrow: bool = False
    takes_narrow: bool = False
    whole_because: str | None = None

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        if "ordinary" in vars(cls) and rule_of(cls.ordinary) is None:  # a second rule is given by partnets.register
            register(cls.ordinary, cls.from_ordinary)
        if hasattr(cls, "ordinary"):
            theirs = inspect.signature(cls.ordinary).parameters.values()
            ours = list(inspect.signature(PartitionedLayer.__init__).parameters.values())[2:-1]
            rest = [parameter for parameter in theirs if parameter.kind is parameter.VAR_KEYWORD]
            cls.__signature__ = inspect.Signature([*(p for p in theirs if p not in rest), *ours, *rest])

    def __init__(
        self,
        *args,
        proportions: Sequence[float] = (1.0,),
        seed: int | None = None,
        defaults: str | Defaults | None = None,
        scheme: str | Nesting = "weight",
        **kwargs,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.divide(proportions, seed=seed, defaults=defaults, scheme=scheme)

    @property
    def partition(self) -> Partition:
        """The partition of the parameter `weight`; AttributeError if it has none."""
        if "weight" not in self.partitions:
            raise AttributeError(f"a {type(self).__name__} has no partition of its own; see `partitions`.")
        return self.partitions["weight"]

    @partition.setter
    def partition(self, partition: Partition) -> None:
        self.partitions["weight"] = partition

    def divide(
        self,
        proportions: Sequence[float],
        *,
        seed: int | None,
        defaults: str | Defaults | None,
        scheme: str | Nesting = "weight",
    ) -> None:
        """Partitions this layer, which is still an ordinary one inside (Appendix C).

        A weight starts at its defaults, except with 'zero', 'stored' or Zeros(), where it stays as it is. With 'seed'
        the shifts are drawn anew as well, unless the layer has `seed_defaults` (see partnets.partition). A parameter
        that requires no gradient stays as it is, in every subnetwork: all of such a weight belongs to partition 1.
        """
        check_parameters(self, *self.weights, *self.shifts, *self.scales)
        sizes(0, proportions)
        for name, weight in self._present(self.weights):
            if not weight.is_floating_point():
                raise TypeError(f"the {name} is {weight.dtype}; pass a dtype of real numbers, such as torch.float32.")
        if not (isinstance(scheme, Nesting) or scheme in SCHEMES):
            raise ValueError(f"scheme={scheme!r}; pass 'weight', 'node' or 'nested'.")
        if scheme == "nested":
            scheme = self.nested_alone(proportions) or "weight"
        if is_nested := isinstance(scheme, Nesting):
            defaults = no_defaults(defaults)
            self.nesting = scheme
        defaults = "seed" if defaults is None else defaults
        count, seed = len(proportions), seeds.random() if seed is None else seed
        at_zero = self._starts_at_zero()
        changed, partitions, self.starts = {}, {}, dict(self._starts())
        for name, parameter in self._present(self.weights):
            if not parameter.requires_grad:
                whole = self.divided(name, parameter, (1.0,) + (0.0,) * (count - 1), seed, "weight")
                partitions[name] = whole.to(parameter.device)
                continue
            if is_nested:
                partitions[name] = self.nested_partition(name, self.oriented(parameter).shape, scheme)
                self.starts = self._started_otherwise(name, parameter) | self.starts
                continue
            partition = self.divided(name, parameter, proportions, seed, scheme).to(parameter.device)
            resolved = self._resolve(name, parameter, defaults, self.seed_of(name, seed))
            partitions[name] = dataclasses.replace(partition, defaults=resolved.map_tensors(self.oriented))
            if defaults == "seed" or not (isinstance(resolved, Zeros) or defaults == "stored"):
                changed[name] = self._started(parameter, partitions[name].defaults)
            elif defaults == "zero":
                self.starts = self._started_otherwise(name, parameter) | self.starts
        for names, neutral in ((self.shifts, 0.0), (self.scales, 1.0)):
            for name, parameter in self._present(names):
                units = self.units_of_parameter(name, scheme) if is_nested else None
                if units is not None and not units.is_whole:
                    partitions[name] = Partition.nested(self.seen_by_partition(name, parameter).shape, units)
                    continue
                drawn = defaults == "seed" and parameter.requires_grad and not neutral
                value = self._redrawn(name, parameter, seed) if drawn else parameter
                changed[name] = with_rows(value, count, neutral=neutral)
        for name, parameter in changed.items():
            vars(parameter).update(vars(self._parameters[name]))  # what others have noted on it
            self._parameters[name] = parameter
        self.partitions = partitions
        self.count = self.active = self.update = count
        if at_zero:  # as an adapter's last layer does, which changes nothing at first: so it does when it starts anew
            self.seed_defaults = Zeros()

    def _starts(self) -> Iterator[tuple[str, Start]]:
        """The shifts and scales that start otherwise than torch has them, and weights that were not drawn."""
        if self.seed_defaults is not None:
            return
        for names, neutral in ((self.shifts, 0.0), (self.scales, 1.0)):
            for name, parameter in self._present(names):
                if not parameter.requires_grad or parameter.is_meta or not parameter.numel():
                    continue
                usual = None if neutral else self.usual_distribution(name)
                if usual is None:
                    is_usual = bool((parameter == neutral).all())
                else:
                    is_usual = distribution_of(parameter, usual) is usual
                if not is_usual:
                    yield name, Start.of(parameter)
        for name, weight in self._present(self.weights):
            if weight.requires_grad and weight.numel() > 1 and not weight.is_meta:
                start = Start.of(self.drawn_entries(weight))
                if start.values is not None and start.values.shape == weight.shape:
                    yield name, start

    def _started_otherwise(self, name: str, weight: Tensor) -> dict[str, Start]:
        """How a weight that stays was drawn, if not as torch draws it and nothing else says so."""
        if self.seed_defaults is not None or weight.is_meta or not weight.numel() or self.looks_drawn(name, weight):
            return {}
        return {name: Start.of(self.drawn_entries(weight))}

    def _starts_at_zero(self) -> bool:
        """Whether the weight is 0, and no rule says how it starts."""
        weight = self._parameters.get("weight")
        known = self.seed_defaults is not None or not self._parameters.keys() <= {"weight", "bias"}
        return not known and weight is not None and weight.dim() > 1 and not weight.is_meta and not weight.any()

    def nested_alone(self, proportions: Sequence[float]) -> Nesting | None:
        """How a layer of which nobody knows what is around it nests: its outputs in order, with all inputs live.

        None if it can't, or not without units that are divided before it.
        """
        if self.keeps_units or not self.can_nest(self):
            return None
        size = self.made_units(self)
        return Nesting(widths(size, proportions), None, widths(self.inner_units(self) or size, proportions))

    @classmethod
    def can_nest(cls, layer: nn.Module) -> bool:
        """Whether the units of a layer of torch's, of which this class is made, can be divided."""
        return cls.unit_dim is not None and all(parameter.requires_grad for parameter in layer.parameters())

    @property
    def by_unit(self) -> bool:
        """Whether a unit of the outputs is computed of the same unit, or group, of the inputs alone."""
        return self.keeps_units

    @classmethod
    def may_take_few(cls, layer: nn.Module, inputs: Units) -> bool:
        """Whether such a layer can be given the live inputs alone."""
        return True

    @classmethod
    def may_be_narrow(cls, layer: nn.Module, outputs: Units) -> bool:
        """Whether such a layer's outputs can be the live ones alone."""
        return not outputs.is_whole

    @classmethod
    def can_take(cls, layer: nn.Module, units: Units) -> bool:
        """Whether such a layer can leave out those of its inputs that are not live."""
        return True

    @classmethod
    def made_units(cls, layer: nn.Module) -> int:
        """How many units such a layer makes."""
        return getattr(layer, cls.unit_names[-1])

    @classmethod
    def inner_units(cls, layer: nn.Module) -> int | None:
        """How many units such a layer has inside; None if it has none."""
        return None

    def nested_partition(self, name: str, shape: torch.Size, nesting: Nesting) -> NestedPartition:
        """The partition of a weight, of this shape as its partition sees it."""
        return Partition.nested(shape, nesting.outputs, self._units_or_all(nesting.inputs, shape[1], nesting))

    def _units_or_all(self, units: Units | None, size: int, nesting: Nesting) -> Units:
        return units if units is not None and units.size == size else Units.whole(size, nesting.outputs.count)

    def units_of_parameter(self, name: str, nesting: Nesting) -> Units | None:
        """To which units the entries of a shift or a scale belong; None if it is of all of them alike."""
        return nesting.outputs

    def seen_by_partition(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter, or what has its shape, as its partition sees it: a view."""
        return self.oriented(tensor) if name in self.weights else tensor

    def as_parameter(self, name: str, tensor: Tensor) -> Tensor:
        """The inverse of seen_by_partition."""
        return self.seen_by_partition(name, tensor)

    def _present(self, names: Sequence[str]) -> Iterator[tuple[str, nn.Parameter]]:
        for name in names:
            parameter = self._parameters.get(name)
            if parameter is not None:
                yield name, parameter

    def divided(self, name: str, weight: Tensor, proportions: Sequence[float], seed: int, scheme: str) -> Partition:
        """The partition of a weight, without its defaults."""
        shape, own = self.oriented(weight).shape, self.seed_of(name, seed)
        if scheme == "weight":
            return Partition.random(shape, proportions, seed=own)
        nodes = self.nodes(name, shape)
        of_nodes = Partition.random((1, int(nodes.max()) + 1), proportions, seed=own).ids()[0]
        return Partition.from_ids(of_nodes[nodes].expand(shape).contiguous(), count=len(proportions))

    def seed_of(self, name: str, seed: int) -> int:
        """The seed of one of the layer's parameters."""
        return seed if name in ("weight", "bias") else seeds.derived(seed, name)

    def nodes(self, name: str, shape: torch.Size) -> Tensor:
        """Which of the layer's outputs depends on each entry of a weight: int64, 0.., broadcast to its shape."""
        return torch.arange(shape[0], device="cpu").view(-1, *[1] * (len(shape) - 1))

    def usual_distribution(self, name: str) -> Distribution | None:
        """What torch draws a weight or a shift from when it makes such a layer; None if it is not drawn."""
        if "weight" not in self.weights:
            return None
        # 1 / sqrt(fan_in), for the weight and the bias alike
        return functools.partial(Uniform, 1 / math.sqrt(max(self._parameters["weight"][0].numel(), 1)))

    def drawn_entries(self, weight: Tensor) -> Tensor:
        """Those entries of an ordinary layer's weight that its initialisation draws."""
        return weight

    def looks_drawn(self, name: str, weight: Tensor) -> bool:
        """Whether an ordinary layer's weight looks as torch draws it."""
        usual = self.usual_distribution(name)
        return distribution_of(self.drawn_entries(weight), usual) is usual

    def oriented(self, weight: Tensor) -> Tensor:
        """A weight as its partition sees it, [out, in]: a view. Layers that keep the transpose override this."""
        return weight

    def _resolve(self, name: str, weight: Tensor, defaults: str | Defaults, seed: int) -> Defaults:
        if defaults == "seed":
            return declared(self, seed) or distribution_of(self.drawn_entries(weight), self.usual_distribution(name))(
                seed=seed
            )
        if defaults == "zero":
            return Zeros()
        if defaults == "stored":
            return Stored(weight.detach().clone())
        if isinstance(defaults, Defaults):
            return defaults
        raise ValueError(
            f"defaults={defaults!r}; pass 'seed', 'zero', 'stored', or one of partkernels' Zeros, Uniform, Normal,"
            " Stored."
        )

    def _started(self, weight: nn.Parameter, defaults: Defaults) -> nn.Parameter:
        """A new parameter at its defaults."""
        seen = self.oriented(weight)
        values = torch.empty_like(weight, memory_format=torch.contiguous_format)
        self.oriented(values).copy_(defaults.values(seen.shape, seen.dtype, seen.device))
        return nn.Parameter(values, requires_grad=weight.requires_grad)

    def _redrawn(self, name: str, shift: nn.Parameter, seed: int) -> nn.Parameter:
        """A shift drawn anew as torch draws it; itself if torch does not, or if it was drawn otherwise."""
        usual = None if self.seed_defaults is not None else self.usual_distribution(name)
        if usual is None or distribution_of(shift, usual) is not usual:
            return shift
        drawn = dataclasses.replace(usual(seed=self.seed_of(name, seed)), stream=SHIFT_STREAM)
        values = drawn.values((1, shift.numel()), shift.dtype, shift.device).clone().view(shift.shape)
        return nn.Parameter(values, requires_grad=shift.requires_grad)

    @classmethod
    def from_ordinary(
        cls,
        layer: nn.Module,
        proportions: Sequence[float],
        *,
        seed: int | None = None,
        defaults: str | Defaults | None = None,
        scheme: str | Nesting = "weight",
    ) -> PartitionedLayer:
        """A partitioned layer made of an ordinary one, which stays as it is; parameters that need no change are shared.

        Dtype, device, requires_grad, training mode and hooks are the layer's. See the class for the other arguments.

        Raises:
            ValueError: the proportions, seed, defaults or scheme are invalid, or the layer has other parameters than
                its class.

        Example:
            >>> import partnets
            >>> partnets.Linear.from_ordinary(nn.Linear(4, 3), (0.5, 0.5), seed=0)
            Linear(in_features=4, out_features=3, bias=True, partitions=[6, 6])
            >>> layer = partnets.LayerNorm.from_ordinary(nn.LayerNorm(2), (0.5, 0.5))
            >>> layer.weight.tolist(), layer.bias.tolist()
            ([[1.0, 1.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]])
        """
        new = as_class(layer, cls)
        new.divide(proportions, seed=seed, defaults=defaults, scheme=scheme)
        return new

    def entries(self, name, tensors, update):
        if name in self.partitions:
            return [self.seen_by_partition(name, tensor) for tensor in tensors], self.partitions[name]
        return super().entries(name, tensors, update)

    def to_ordinary(self, active: int) -> nn.Module:
        """torch's layer that computes what subnetwork `active` computes; shares no parameter with this one."""
        for name in (*self.weights, *self.shifts, *self.scales):
            self.own(name)
        new = as_class(self, self.ordinary)
        for name, parameter in self.named_parameters(recurse=False):
            value = self._value(name, parameter.detach(), active, None)
            if isinstance(partition := self.partitions.get(name), NestedPartition):
                value = self.as_parameter(
                    name, self.live_block(name, self.seen_by_partition(name, value), partition, active)
                )
            value = value.contiguous() if name in self.partitions else value.clone()
            new._parameters[name] = nn.Parameter(value, requires_grad=parameter.requires_grad)
        if self.nesting is None:
            return new
        if self.takes_narrow and len(self.unit_names) > 1 and not self.by_unit:
            setattr(new, self.unit_names[0], self.nesting.inputs.number(active))
        if (few := self.nesting.outputs.number(active)) == self.nesting.outputs.size:
            return new
        if not self._makes_few():
            return new
        before = dict(vars(new))
        self.tell_size(new, few)
        if not self.by_unit or (self.is_narrow and self.takes_narrow):
            return new
        told = {name: value for name, value in before.items() if value is not vars(new)[name]}
        return LiveUnits(new, self.nesting.outputs, self.unit_dim, active, self.is_narrow, told)

    def _makes_few(self) -> bool:
        """Whether an ordinary layer in place of this one computes the live units alone."""
        # Whose weight others read stays as large as they know it.
        return self.is_narrow or self.keeps_units or (self.by_unit and self.takes_narrow and not self.is_read)

    def tell_size(self, layer: nn.Module, size: int) -> None:
        """Tells an ordinary layer, whose parameters are for so many units, that it makes so many."""
        for name in self.unit_names[-1:]:
            setattr(layer, name, size)

    def live_block(self, name: str, value: Tensor, partition: NestedPartition, active: int) -> Tensor:
        """What of a parameter's value an ordinary layer needs whose inputs or outputs are the live ones alone."""
        if self._makes_few():
            value = partition.row_units.take(value, 0, active)
        return partition.col_units.take(value, 1, active) if self.takes_narrow and value.dim() > 1 else value

    def to_fresh(self) -> nn.Module:
        """torch's layer with initial values anew; its weights are drawn as this layer's were, from another seed.

        Raises:
            ValueError: this layer's defaults are stored ones: it started at values that were given.
        """
        if any(isinstance(partition.defaults, Stored) for partition in self.partitions.values()):
            raise ValueError(
                "its defaults are stored: it started at weights that were given, and of its bias they are lost; start"
                " from those weights instead."
            )
        new = super().to_fresh()
        for name, partition in self.partitions.items():
            weight, defaults = new._parameters[name], partition.defaults
            if isinstance(defaults, Uniform | Normal) and self.seed_defaults is None and weight.requires_grad:
                fill(self.oriented(weight), dataclasses.replace(defaults, seed=seeds.random()))
        for name, start in self.starts.items():
            start.fill(new._parameters[name])
        return new

    def compute(self, kernel: Callable[..., Tensor], x: Tensor, **geometry) -> Tensor:
        """What the live subnetwork makes of x by one of partkernels' operators; w_update and b_update get gradients."""
        parameters = self._parameters
        if "weight" in parameters and "bias" in parameters:
            weight, bias = parameters["weight"], parameters["bias"]
        else:
            weight, bias = self.own("weight"), self.own("bias")
        active, update = self.current_subnetwork()
        if update is None:  # where nothing learns, what is detached has no gradient computed for its sake
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        weight = self.oriented(weight)
        if "bias" in self.partitions:
            bias = self._value("bias", bias, active, update)
        elif bias is not None and self.count > 1 and (bias.dim() != 2 or bias.shape[0] != self.count):
            raise_without_rows("bias", bias, self.count)
        if self.is_narrow:
            geometry["narrow"] = True
        y = kernel(x, weight, self.partitions["weight"], active, update=update, bias=bias, **geometry)
        return same_subnetwork(self, y)

    def compute_live(self, function: Callable[..., Tensor], x: Tensor, *names: str) -> Tensor:
        """function(x, values of the parameters of these names), of live units alone where partitions are nested."""
        values = [self.live(name) for name in names]
        if self.nesting is None:
            return same_subnetwork(self, function(x, *values))
        units, active = self.nesting.outputs, self.active
        few = [
            units.take(one, 0, active) if name in self.partitions else one
            for name, one in zip(names, values, strict=True)
        ]
        y = of_live(lambda x: function(x, *few), units, self.unit_dim, active, self.is_narrow, x)
        return same_subnetwork(self, y)

    def compute_block(self, function: Callable[..., Tensor], x: Tensor, is_transposed: bool = False) -> Tensor:
        """function(x, weight, bias) of a weight that is rebuilt as a whole; of its live block, if it is nested.

        Args:
            is_transposed: whether the weight's rows are inputs, and its columns outputs.
        """
        weight, bias = self.live("weight"), self.live("bias")
        if self.nesting is None:
            return same_subnetwork(self, function(x, weight, bias))
        partition, active = self.partition, self.active
        units = partition.row_units, partition.col_units
        taken, made = units if is_transposed else units[::-1]
        few = x if x.shape[self.unit_dim] == taken.number(active) else taken.take(x, self.unit_dim, active)
        block = units[1].take(units[0].take(weight, 0, active), 1, active)
        y = function(few, block, None if bias is None else made.take(bias, 0, active))
        return same_subnetwork(self, y if self.is_narrow else made.spread(y, self.unit_dim, active))

    def live(self, name: str) -> Tensor | None:
        """A parameter of the live subnetwork, a weight rebuilt as a whole; only partition `update` gets a gradient.

        None if there is no such parameter.
        """
        parameter = self.own(name)
        if parameter is None:
            return None
        return same_subnetwork(self, self._value(name, parameter, *self.current_subnetwork()))

    def __getattr__(self, name: str):
        """As torch's, but that a parameter is that of the live subnetwork inside of partnets.subnetwork.

        Whoever ties a weight by F.linear(x, self.embedding.weight) would else read what all partitions have learned.
        """
        own = self.__dict__
        # Under which a state_dict has the partition: torch.distributed.checkpoint.state_dict looks each key up.
        if name.endswith(PARTITION_OF) and name.removesuffix(PARTITION_OF) in own.get("partitions", ()):
            return own["partitions"][name.removesuffix(PARTITION_OF)]
        value = super().__getattr__(name)
        if value is None or name not in own["_parameters"] or "count" not in own:
            return value
        if is_sharded(value):  # as FSDP's between two passes: who gathers it asks for it
            return value
        if not (self.is_read or (self.count > 1 and self.is_inside())) or not self._is_divided(name):
            return value
        live = self.live(name)
        if self.count > 1 and name in self.shifts and not self.is_inside():
            show(self, name, live)
        if _read is not None:
            _read.append((self, name, live, live.detach().clone()))
        return live

    def owned(self):
        return ((name, parameter) for name, parameter in super().owned() if self._is_divided(name))

    def _is_divided(self, name: str) -> bool:
        """Whether a parameter is one of those that were divided; others have been added since."""
        return name in self.weights or name in self.shifts or name in self.scales

    def _value(self, name: str, parameter: Tensor, active: int, update: int | None) -> Tensor:
        if not self._is_divided(name):
            return parameter
        if name in self.partitions:
            weight = self.seen_by_partition(name, parameter)
            return self.as_parameter(name, subnetwork_weight(weight, self.partitions[name], active, update=update))
        combine = live_product if name in self.scales else live_sum
        return combine(parameter, self.count, active, update)

    def reset_parameters(self) -> None:
        """Weights back to their defaults, or to torch's initial values if those are 0; shifts and scales to torch's.

        Raises:
            RuntimeError: inside of partnets.subnetwork, where torch would reset what is computed from the parameters.
        """
        if "count" not in self.__dict__:  # torch's own constructor calls this
            super().reset_parameters()
            return
        if self.is_inside():
            raise RuntimeError("reset_parameters resets all partitions; call it outside of partnets.subnetwork.")
        super().reset_parameters()
        with torch.no_grad():
            for name, partition in self.partitions.items():
                if not isinstance(partition.defaults, Zeros):
                    weight = self.oriented(self._parameters[name])
                    place = {"row": partition.row, "col": partition.col}
                    weight.copy_(partition.defaults.values(weight.shape, device=weight.device, **place))
            for names, neutral in ((self.shifts, 0.0), (self.scales, 1.0)):
                for name, parameter in self._present(names):
                    if self.count > 1 and name not in self.partitions:
                        parameter[1:] = neutral

    def extra_repr(self) -> str:
        if "count" not in self.__dict__:
            return super().extra_repr()
        maps = [partition for name, partition in self.partitions.items() if name in self.weights]
        is_one = len(maps) == 1 and not maps[0].is_meta
        partitions = maps[0].sizes() if is_one else self.count
        return ", ".join(filter(None, (super().extra_repr(), f"partitions={partitions}")))

    def _apply(self, fn, recurse=True):
        partitions = {name: partition.map_tensors(fn) for name, partition in self.partitions.items()}
        if any(self.partitions[name].is_meta and not new.is_meta for name, new in partitions.items()):
            raise RuntimeError(
                f"this {type(self).__name__} is on the meta device, and its partition cannot be made of empty memory;"
                " use load_state_dict(..., assign=True), or construct the layer on its real device."
            )
        super()._apply(fn, recurse)
        self.partitions = partitions
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.count > 1:
            for name, partition in self.partitions.items():
                destination[prefix + self.partition_key(name)] = partition_format.to_plain(partition)
            # There before it has learned as well: torch.distributed.checkpoint loads what a new model has a place for.
            destination[prefix + LEARNED_FROM] = NOTHING if self.learned_from is None else self.learned_from

    @staticmethod
    def partition_key(weight: str) -> str:
        """What a state_dict calls the partition of a weight."""
        return "partition" if weight == "weight" else weight + PARTITION_OF

    def unfit(self, state_dict, prefix):
        return [*self.saved_partitions(state_dict, prefix)[1], *unfit_tensors(self, state_dict, prefix)]

    def saved_partitions(self, state_dict: Mapping, prefix: str) -> tuple[dict[str, Partition], list[str]]:
        """The partitions that a state_dict has for this layer, and what is wrong with the others."""
        saved, messages = {}, []
        for name, partition in self.partitions.items():
            key = prefix + self.partition_key(name)
            if key in state_dict:
                try:
                    saved[name] = partition_format.from_plain(state_dict[key], partition)
                except (TypeError, ValueError) as error:
                    messages.append(f"{key}: {error}")
            elif self.count > 1 and prefix + name in state_dict:
                messages.append(
                    f"{prefix}{name}: has no {key} beside it, as the state_dict of a partitioned model has, but not its"
                    " parameters alone; if it is an ordinary model's, load it into that, and partition that with"
                    " partnets.partition(..., defaults='stored')."
                )
        return saved, messages

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing_keys, unexpected_keys, error_msgs):
        refuse_unfit(self, state_dict, prefix)
        errors = len(error_msgs)
        saved, _ = self.saved_partitions(state_dict, prefix)
        keys = [prefix + self.partition_key(name) for name in self.partitions]
        theirs = []  # torch does not expect partitions
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing_keys, theirs, error_msgs)
        unexpected_keys += [key for key in theirs if key not in (*keys, *(prefix + note for note in self.notes))]
        if self.count > 1:
            missing_keys += [key for key in keys if key not in state_dict]
        if len(error_msgs) > errors:
            return
        for name, partition in saved.items():
            weight = self._parameters[name]
            copied = partition.map_tensors(lambda tensor, to=weight.device: tensor.to(to, copy=True))
            self.partitions[name] = copied.to(dtype=weight.dtype)
        if any(prefix + name in state_dict for name in self._parameters):
            found = state_dict.get(prefix + LEARNED_FROM, NOTHING)
            self.learned_from = None if found == NOTHING else found
