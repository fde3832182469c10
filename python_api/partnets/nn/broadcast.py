"""Broadcast parameters: a module of any class keeps them for itself, and adds them or multiplies by them."""

from __future__ import annotations

import functools

from torch import Tensor, nn

from partnets.nn.activation_checkpoint import same_subnetwork
from partnets.nn.cumulative import live_sum, with_rows
from partnets.nn.partitioned import Partitioned, as_class


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


class Broadcast(Partitioned):
    """A module of any class whose own parameters have a row for each partition (Appendix I.2).

    Whoever reads such a parameter as an attribute, as the module's own code does, gets b_1 + ... + b_k, that of the
    live subnetwork. The rows [C, ...] are what `parameters()` and the state_dict hold, under the name that the
    parameter had. The first row starts at its value and the others at 0.

    partnets.partition changes the class of a module in place to one that `broadcast_class` makes.
    """

    def to_ordinary(self, active: int) -> nn.Module:
        """A module of the ordinary class that computes what subnetwork `active` computes."""
        new = as_class(self, type(self).ordinary)
        for name, rows in self.named_parameters(recurse=False):
            value = live_sum(rows.detach(), self.count, active, None)
            new._parameters[name] = nn.Parameter(value, requires_grad=rows.requires_grad)
        return new

    def to_fresh(self) -> nn.Module:
        """A module of the ordinary class, whose own reset_parameters sets its parameters to initial values anew.

        Raises:
            ValueError: it has none.
        """
        new = self.to_ordinary(self.count)
        if not hasattr(new, "reset_parameters"):
            raise ValueError(
                f"its {', '.join(self._parameters)} have no initial values; give {type(self).__name__} a"
                " reset_parameters() that sets them."
            )
        new.reset_parameters()
        return new

    def __reduce_ex__(self, protocol):
        # Its class is made when it is needed, and cannot be found by its name.
        return _empty, (type(self).ordinary, type(self).names), self.__dict__


def _empty(ordinary: type[nn.Module], names: tuple[str, ...]) -> Broadcast:
    cls = broadcast_class(ordinary, names)
    return cls.__new__(cls)


@functools.cache
def broadcast_class(ordinary: type[nn.Module], names: tuple[str, ...]) -> type[Broadcast]:
    """A subclass of a type of module, of the same name, where parameters of these names are those of Broadcast.

    Example:
        >>> broadcast_class(nn.PReLU, ("weight",)).__name__
        'PReLU'
    """

    def live(name):
        def read(self):
            rows = self._parameters[name]
            return None if rows is None else same_subnetwork(self, live_sum(rows, self.count, self.active, self.update))

        return property(read)

    attributes = {name: live(name) for name in names}
    attributes |= {"ordinary": ordinary, "names": names, "__doc__": ordinary.__doc__}
    attributes |= {"__module__": ordinary.__module__, "__qualname__": ordinary.__qualname__}
    return type(ordinary.__name__, (Broadcast, ordinary), attributes)


def divide(module: nn.Module, count: int) -> None:
    """Gives a module's own parameters, all of them broadcast, a row for each partition, in place."""
    names = tuple(module._parameters)
    rows = {
        name: None if parameter is None else with_rows(parameter, count, neutral=0.0)
        for name, parameter in module._parameters.items()
    }
    module.__class__ = broadcast_class(type(module), names)
    module._parameters.update(rows)
    module.count = module.active = module.update = count
