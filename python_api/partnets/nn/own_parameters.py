"""Own parameters: those that a module of any class keeps for itself, and reads as its attributes."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from partkernels import NestedPartition, Partition, Stored, Units, Zeros
from partnets.nn.initial_values import Start, declared
from partnets.nn.layer import PartitionedLayer
from partnets.nn.state_dict import loads_as_torch


def is_broadcast(parameter: Tensor) -> bool:
    """Whether a parameter looks like one that is broadcast, not multiplied as a matrix.

    It has one dimension larger than 1 at most, as a bias, a scale or a gain; or its first is 1, as of a class token or
    of position embeddings, [1, length, width].

    Example:
        >>> import torch
        >>> [is_broadcast(torch.zeros(shape)) for shape in [(1,), (8,), (8, 1, 1), (1, 16, 8), (8, 16)]]
        [True, True, True, True, False]
    """
    return parameter.dim() == 0 or parameter.shape[0] == 1 or sum(n > 1 for n in parameter.shape) <= 1


class OwnUnits(NamedTuple):
    """How the own parameters of a module nest.

    Attributes:
        along: of those that meet units, along which dimension they have some, and these.
        nested: the names of those whose entries belong to the partition of their unit.
    """

    along: Mapping[str, tuple[int, Units]]
    nested: Collection[str]


class OwnParameters(PartitionedLayer):
    """A module of any class, whose code reads its own parameters as attributes: it gets those of the live subnetwork.

    Those that are broadcast are shifts, b_1 + ... + b_k, with a row for each partition (Appendix I.2). The first row
    starts at the parameter's value and the others at 0. Others are weights, each entry of which belongs to a partition
    (Section 3). Nobody knows how they are drawn: they start as they are, and so do their defaults, a copy, with 'seed'
    too; unless the module has `seed_defaults`. `parameters()` and the state_dict hold rows and entries under the names
    that the parameters had.

    partnets.partition changes the class of a module in place to one that `own_parameters_class` makes.
    """

    def __init_subclass__(cls, **kwargs) -> None:
        """Nothing: such classes are made one by one, and are no rule for others."""

    is_read = True

    caches: Sequence[str] = ()

    # Of parameters that meet units of a nested subnetwork, along which dimension they have some, and these.
    units_along: Mapping[str, tuple[int, Units]] = MappingProxyType({})

    def divide(self, proportions, *, scheme="weight", **options):
        """As PartitionedLayer.divide. With a scheme of OwnUnits, partitions of some parameters are nested."""
        own = scheme if isinstance(scheme, OwnUnits) else OwnUnits({}, ())
        nested = {name: self._parameters[name] for name in own.nested}
        learning = {name: p for name, p in self._present((*self.weights, *self.shifts)) if p.requires_grad}
        starts = {name: Start.of(p) for name, p in learning.items() if not p.is_meta and p.numel()}
        super().divide(proportions, scheme="weight" if isinstance(scheme, OwnUnits) else scheme, **options)
        self.starts = starts
        self.units_along = own.along
        for name, parameter in nested.items():
            dim, units = own.along[name]
            self._parameters[name] = parameter
            self.partitions[name] = Partition.nested(parameter.movedim(dim, 0).shape, units)
        self.__dict__.update({name: PerSubnetwork() for name in self.caches})

    def seen_by_partition(self, name, tensor):
        return (
            tensor.movedim(self.units_along[name][0], 0)
            if self._nests(name)
            else super().seen_by_partition(name, tensor)
        )

    def as_parameter(self, name, tensor):
        return tensor.movedim(0, self.units_along[name][0]) if self._nests(name) else super().as_parameter(name, tensor)

    def _nests(self, name: str) -> bool:
        return name in self.units_along and isinstance(self.partitions.get(name), NestedPartition)

    def _value(self, name, parameter, active, update):
        value = super()._value(name, parameter, active, update)
        if self.is_narrow and name in self.units_along:
            dim, units = self.units_along[name]
            value = units.take(value, dim, active)
        return value

    def live_block(self, name, value, partition, active):
        return value  # which is narrow already

    def to_ordinary(self, active):
        new = super().to_ordinary(active)
        new.__dict__.update({name: {} for name in self.caches})
        return new

    def train(self, mode=True):
        for name in self.caches:  # the class itself may look at the cache of this subnetwork alone
            self.__dict__[name].clear()
        return super().train(mode)

    def usual_distribution(self, name):
        return None

    def _resolve(self, name, weight, defaults, seed):
        if defaults == "seed" and declared(self, seed) is None:
            return Stored(weight.detach().clone())
        return super()._resolve(name, weight, defaults, seed)

    def to_fresh(self) -> nn.Module:
        """A module of the ordinary class, whose own reset_parameters sets its parameters to initial values anew.

        Raises:
            ValueError: it has none, or that leaves something that has learned.
        """
        new = self._to_start_from()
        if not hasattr(new, "reset_parameters"):
            raise ValueError(
                f"its {', '.join(self._parameters)} have no initial values; give {type(self).__name__} a"
                " reset_parameters() that sets them."
            )
        before = {name: parameter.detach().clone() for name, parameter in new.named_parameters(recurse=False)}
        new.reset_parameters()
        with torch.no_grad():
            for name, value in before.items():
                parameter = new._parameters[name]
                if not parameter.requires_grad:
                    parameter.copy_(value)
                elif torch.equal(parameter, value) and (value != value.flatten()[0]).any():
                    raise ValueError(
                        f"its reset_parameters() leaves {name} as it is, which has learned; let it set all that learns."
                    )
        if (type(new).reset_parameters.__module__ or "").startswith("torch."):  # which knows nothing of who else draws
            for name, start in self.starts.items():
                if not start.fits(new._parameters[name]):
                    start.fill(new._parameters[name])
        return new

    def _to_start_from(self) -> nn.Module:
        """The module that to_fresh sets to initial values."""
        return self.to_ordinary(self.count)

    def reset_parameters(self) -> None:
        """Weights back to their defaults, or to what the class itself sets where those are 0; shifts to the latter."""
        fresh = self.to_fresh()
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                value = fresh._parameters[name]
                if name in self.shifts and self.count > 1 and name not in self.partitions:
                    parameter[0], parameter[1:] = value, 0
                elif name in self.partitions and not isinstance(defaults := self.partitions[name].defaults, Zeros):
                    parameter.copy_(defaults.values(parameter.shape, parameter.dtype, parameter.device))
                else:
                    parameter.copy_(value)

    def unfit(self, state_dict, prefix):
        if loads_as_torch(self, self.ordinary):
            return super().unfit(state_dict, prefix)
        return self.saved_partitions(state_dict, prefix)[1]

    def __reduce_ex__(self, protocol):
        # Its class is made when it is needed, and cannot be found by its name.
        return _empty, (type(self).ordinary, type(self).weights, type(self).shifts, type(self).caches), self.__dict__


class PerSubnetwork(dict):
    """A cache for each pair of active and update; copies start empty."""

    def __missing__(self, live: tuple[int, int | None]) -> dict:
        return self.setdefault(live, {})

    def __reduce__(self):
        return PerSubnetwork, ()


def _empty(
    ordinary: type[nn.Module], weights: tuple[str, ...], shifts: tuple[str, ...], caches: tuple[str, ...]
) -> OwnParameters:
    cls = own_parameters_class(ordinary, weights, shifts, caches)
    return cls.__new__(cls)


@functools.cache
def own_parameters_class(
    ordinary: type[nn.Module], weights: tuple[str, ...], shifts: tuple[str, ...], caches: tuple[str, ...] = ()
) -> type[OwnParameters]:
    """A subclass of a type of module, of the same name, where parameters of these names are those of OwnParameters.

    Args:
        ordinary: the type.
        weights, shifts: the names of the parameters of either kind.
        caches: the names of dicts in which the module keeps, in evaluation mode, what it computed from its parameters.
            Each subnetwork has a dict of its own; train() and who sets one empties all.

    Example:
        >>> own_parameters_class(nn.PReLU, (), ("weight",)).__name__
        'PReLU'
    """

    return class_of(OwnParameters, ordinary, weights, shifts, caches, {})


def class_of(
    base: type[OwnParameters], ordinary: type[nn.Module], weights: Sequence[str], shifts: Sequence[str],
    caches: Sequence[str], attributes: dict,
) -> type[OwnParameters]:  # fmt: skip
    """A subclass of a type of module and of a base, with the name of the type and with these attributes."""

    def cache(name):
        return property(
            lambda self: self.__dict__[name][self.active, self.update], lambda self, _: self.__dict__[name].clear()
        )

    attributes = attributes | {name: cache(name) for name in caches}
    attributes |= {"ordinary": ordinary, "weights": weights, "shifts": shifts, "caches": caches}
    attributes |= {"__doc__": ordinary.__doc__, "__module__": ordinary.__module__}
    attributes |= {"__qualname__": ordinary.__qualname__}
    return type(ordinary.__name__, (base, ordinary), attributes)
