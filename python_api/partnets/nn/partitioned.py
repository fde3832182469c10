"""Partitioned: what everything that is divided among C partitions has in common, whatever it computes."""

from __future__ import annotations

import copy
import inspect
import threading
import types
import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from partkernels import Partition
from partkernels.autograd_threads import handed_on
from partnets.nn.initial_values import reinitialise

# What `subnetwork` leaves with torch, {layer: (active, update)}, which hands it on to threads that run backward passes.
HANDED_ON = "partnets.subnetwork"

# The fingerprint of chunks that nobody has told.
UNKNOWN = ""


class _Existing(weakref.WeakSet):
    """Modules that there are; `made` tells who has looked at all of them whether there have been more since."""

    made = 0

    def add(self, item: Partitioned) -> None:
        self.made += 1
        super().add(item)


# All partitioned modules that there are: how a parameter is known for one of theirs.
EXISTING = _Existing()

# Parameters of ordinary layers that partitioned ones have replaced.
REPLACED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class _Live(threading.local):
    """What the present thread does with a layer.

    Attributes:
        now: its `active` and `update`; None outside of any partnets.subnetwork.
        learned: the partitions that have been `update` since their last step, for the optimisers.
        unlearned: `active` and `update` of its last pass without autograd, which checkpoints may repeat.
    """

    def __init__(self) -> None:
        # Of the instance: the compiler guards on what it finds there, and would overlook what comes before the class's.
        self.now: tuple[int, int | None] | None = None
        self.learned: set[int] = set()
        self.unlearned: tuple[int, int | None] | None = None

    def __reduce__(self):
        return _Live, ()


class Partitioned(nn.Module):
    """The base class of what is divided among C partitions: layers, or a module that owns whole networks.

    partnets.subnetwork, merge, finalize and the optimisers use what is defined here and nothing else. The defaults
    serve a module each of whose own parameters has a row for each partition, [C, ...], or none of it where C is 1.

    Attributes:
        count: C, the number of partitions.
        active: k, 1..C, the live subnetwork. Starts at C.
        update: the partition that receives gradients, 1..active, or None. Starts at C: data of an unknown chunk may
            reach the last partition only. Set both with partnets.subnetwork; each thread has its own, and starts at C,
            as copies and saved layers do.
        learned_from: the fingerprint of the partnets.Chunks that it has learned from; None before the first step.

    Example:
        >>> import torch, partnets
        >>> class Networks(Partitioned):
        ...     "A network of its own for each partition; subnetwork k is network k alone."
        ...     def __init__(self, *networks):
        ...         super().__init__()
        ...         self.networks = nn.ModuleList(networks)
        ...         self.count = self.active = self.update = len(networks)
        ...     def owned(self):
        ...         return self.named_parameters()
        ...     def entries(self, name, tensors, update):
        ...         return (tensors, None) if name.startswith(f"networks.{update - 1}.") else None
        ...     def forward(self, x):
        ...         network = self.networks[self.active - 1]
        ...         weights = dict(network.named_parameters())
        ...         if self.update != self.active:
        ...             weights = {name: weight.detach() for name, weight in weights.items()}
        ...         return torch.func.functional_call(network, weights, x)
        >>> model = Networks(nn.Linear(2, 1), nn.Linear(2, 1))
        >>> with partnets.subnetwork(model, active=1, update=1):
        ...     model(torch.ones(2)).backward()
        >>> [name for name, parameter in model.owned() if parameter.grad is not None]
        ['networks.0.weight', 'networks.0.bias']
    """

    count: int
    # Whether a forward that is not its own reads its parameters: it gets those of the live subnetwork, also outside of
    # any partnets.subnetwork.
    is_read: bool = False
    # The fingerprint of the chunks that it has learned from; UNKNOWN after steps in a loop that has not told them.
    learned_from: str | None = None
    _live: _Live
    # `active` and `update` outside of any partnets.subnetwork.
    _outside: tuple[int, int | None]

    @property
    def active(self) -> int:
        return self.current_subnetwork()[0]

    @active.setter
    def active(self, active: int) -> None:
        self._assign(active, self.current_subnetwork()[1] if "_live" in self.__dict__ else active)

    @property
    def update(self) -> int | None:
        return self.current_subnetwork()[1]

    @update.setter
    def update(self, update: int | None) -> None:
        self._assign(self.current_subnetwork()[0] if "_live" in self.__dict__ else self.count, update)

    def current_subnetwork(self) -> tuple[int, int | None]:
        """`active` and `update`, in one look."""
        now = self._live.now
        if now is None:
            now = self._handed_on()
        return self._outside if now is None else now

    def learning(self) -> set[int]:
        """The partitions that may learn: `update`, or all where each example has a subnetwork of its own."""
        now = self.current_subnetwork()
        if not isinstance(now, tuple):
            return set(range(1, self.count + 1))
        return set() if now[1] is None else {now[1]}

    def is_inside(self) -> bool:
        """Whether a subnetwork has been chosen, by partnets.subnetwork or by `active` and `update`."""
        chosen = self._live.now is not None or self._handed_on() is not None
        return chosen or self._outside != (self.count, self.count)

    def _handed_on(self) -> tuple[int, int | None] | None:
        """What is live where this thread's backward pass was started, if that was in another thread."""
        return None if torch.compiler.is_compiling() else handed_on(HANDED_ON, {}).get(self)

    def _assign(self, active: int, update: int | None) -> None:
        if "_live" not in self.__dict__:
            self._live, self._outside = _Live(), (active, update)
            EXISTING.add(self)
        elif self._live.now is None:
            self._outside = active, update
        else:
            self._live.now = active, update

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state | {"_live": _Live()})
        EXISTING.add(self)

    def _replicate_for_data_parallel(self) -> Partitioned:
        """A replica computes in another thread, and there the subnetwork that is live here."""
        replica = super()._replicate_for_data_parallel()
        replica._live, replica._outside = _Live(), self.current_subnetwork()
        return replica

    def owned(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The name and the parameter, for each parameter that is divided among the partitions."""
        return self.named_parameters(recurse=False)

    def entries(self, name: str, tensors: list[Tensor], update: int) -> tuple[list[Tensor], Partition | None] | None:
        """What a step of one partition changes of a parameter, for the optimisers.

        Args:
            name: of the parameter, as `owned` has it.
            tensors: the parameter, its gradient and its moments, all of its shape.
            update: the partition, 1..count.

        Returns:
            Views of the tensors, all of whose entries belong to partition `update`, and None; or the tensors and the
            Partition that tells which of their entries do. None if the partition owns nothing of this parameter.
        """
        return (tensors if self.count == 1 else [tensor[update - 1] for tensor in tensors]), None

    def own(self, name: str) -> nn.Parameter | None:
        """The parameter of this name, or None if the module has it as None.

        Raises:
            RuntimeError: it is computed from others, by torch.nn.utils.parametrize, weight_norm or prune. No partition
                owns those: they would carry what is learned from one chunk into all partitions.
        """
        try:
            return self._parameters[name]
        except KeyError:
            if getattr(self, name, None) is None:
                return None
            raise RuntimeError(
                f"the {name} of this {type(self).__name__} is computed from other parameters, which no partition owns;"
                " remove its parametrization, weight normalisation or pruning before the layer is partitioned."
            ) from None

    def unfit(self, state_dict: Mapping, prefix: str) -> list[str]:
        """What is wrong with a state_dict's entries for this module alone, if it loads them in a way of its own."""
        return []

    def to_ordinary(self, active: int) -> nn.Module:
        """An ordinary module that computes what subnetwork `active` computes; shares no parameter with this one."""
        raise NotImplementedError(
            f"{type(self).__name__} has no to_ordinary(active); define it, for partnets.merge, as a module without"
            " partitions."
        )

    def to_fresh(self) -> nn.Module:
        """An ordinary module as to_ordinary's, with initial values drawn anew by torch's global generator.

        Raises:
            ValueError: a module in it does not know how it starts; see partnets.nn.initial_values.
        """
        new = self.to_ordinary(self.count)
        reinitialise(new)
        return new


def as_class(layer: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """A shallow copy of a layer as an instance of another class. Hooks are shared, so that their handles still work.

    It is not compiled, as torch's own copies are not: what layer.compile() keeps would call the layer. What a
    Partitioned layer knows of its partitions is left behind on the way to a class that is none.
    """
    new = cls.__new__(cls)
    new.__dict__.update(layer.__dict__)
    new.__dict__.pop("_compiled_call_impl", None)
    bind_methods(new, layer)
    for own in ("_parameters", "_buffers", "_modules"):
        new.__dict__[own] = copy.copy(layer.__dict__[own])
    if not issubclass(cls, Partitioned):
        known = [base for base in type(layer).__mro__ if issubclass(base, Partitioned)]
        for name in {name for base in known for name in inspect.get_annotations(base)} - {"seed_defaults"}:
            new.__dict__.pop(name, None)  # how it starts, it knows without partitions too
    return new


def bind_methods(module: nn.Module, of: nn.Module) -> None:
    """Makes methods of another module that a module keeps its own: self.activation = self._swish.

    Those that the other's class has by that name are dropped: this one's class has its own.
    """
    for name, value in list(vars(module).items()):
        if not isinstance(value, types.MethodType) or value.__self__ is not of:
            continue
        if getattr(type(of), name, None) is value.__func__:
            del vars(module)[name]
        else:
            vars(module)[name] = types.MethodType(value.__func__, module)


def take_over(module: nn.Module, other: nn.Module) -> None:
    """Gives a module all that another one has, of its class already: who holds the module holds the other now."""
    vars(module).clear()
    vars(module).update(vars(other))
    bind_methods(module, other)


def check_parameters(layer: nn.Module, *expected: str) -> None:
    """Raises ValueError unless a layer has parameters (or None) of these names and no others.

    Example:
        >>> check_parameters(nn.Linear(2, 2, bias=False), "weight", "bias")
    """
    absent = {name for name in expected if getattr(layer, name, None) is None}
    if set(layer._parameters) | absent != set(expected):
        raise ValueError(
            f"a {type(layer).__name__} with the parameters {sorted(layer._parameters)} cannot be partitioned, only"
            f" one with {' and '.join(expected)}; undo what has renamed them, as weight normalisation or pruning, or"
            " leave it out with skip=."
        )


def partitioned_layers(model: nn.Module) -> Iterator[tuple[str, Partitioned]]:
    """The dotted path and the layer, for each partitioned layer of a model, in the order of model.modules().

    Example:
        >>> import partnets
        >>> model = partnets.partition(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (0.5, 0.5))
        >>> [path for path, _ in partitioned_layers(model)]
        ['0']
    """
    for path, module in model.named_modules():
        if isinstance(module, Partitioned):
            yield path, module


def count(model: nn.Module) -> int:
    """C, the number of partitions of a model's layers.

    Raises:
        ValueError: the model has no partitioned layer, or its layers have different numbers of partitions.

    Example:
        >>> import partnets
        >>> count(partnets.Linear(4, 3, proportions=(0.5, 0.25, 0.25)))
        3
    """
    counts = {path: layer.count for path, layer in partitioned_layers(model)}
    if not counts:
        raise ValueError(
            f"this {type(model).__name__} has no partitioned layer; make them with partnets.partition(model,"
            " proportions)."
        )
    if len(set(counts.values())) > 1:
        raise ValueError(f"the layers differ in their number of partitions, {counts}; partition all of them alike.")
    return next(iter(counts.values()))
