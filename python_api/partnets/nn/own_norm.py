"""Own norms: modules of any class that norm units, and read their scales and shifts as attributes."""

from __future__ import annotations

import functools
import re
from typing import Any

from torch import Tensor, nn

from partnets.nn.own_parameters import OwnParameters, class_of
from partnets.nn.partitioned import bind_methods

# In the names of attributes that are numbers of units.
SIZE = re.compile(
    r"dim|size|shape|feature|channel|width|unit|hidden|embed|planes|num|model|^(d|n|c|nf|nx|in|out)$|^d_|^n_"
)
MISSING = object()


class OwnNorm(OwnParameters):
    """A norm of any class, which is over the live units alone where partitions are nested.

    Its own code computes, with the parameters of the live units, and with their number wherever the module has that of
    all units in an attribute whose name says so, as `normalized_shape` or `dim`. What it writes into itself stays.
    """

    keeps_units = True

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        if self.nesting is None:
            return super().forward(x, *args, **kwargs)
        names = [name for name, parameter in self._parameters.items() if parameter is not None]

        def norm(x: Tensor, *values: Tensor) -> Tensor:
            few = of_size(self, type(self).ordinary, x.shape[self.unit_dim], dict(zip(names, values, strict=True)))
            before = dict(vars(few))
            y = few.forward(x, *args, **kwargs)
            written = {name: value for name, value in vars(few).items() if value is not before.get(name, MISSING)}
            vars(self).update(written)
            return y

        return self.compute_live(norm, x, *names)

    def live_block(self, name, value, partition, active):
        return partition.row_units.take(value, 0, active)

    def tell_size(self, layer, size):
        vars(layer).update(_sizes(vars(layer), self.nesting.outputs.size, size))

    def __reduce_ex__(self, protocol):
        cls = type(self)
        return _empty, (cls.ordinary, cls.shifts, cls.unit_dim), self.__dict__


def of_size(norm: nn.Module, cls: type[nn.Module], size: int, values: dict[str, Tensor]) -> nn.Module:
    """A shallow copy of a norm, as an instance of its ordinary class, for so many units, with these parameters.

    Example:
        >>> import torch
        >>> of_size(nn.LayerNorm(4), nn.LayerNorm, 2, {"weight": torch.ones(2), "bias": torch.zeros(2)})
        LayerNorm((2,), eps=1e-05, elementwise_affine=True...)
    """
    new = object.__new__(cls)
    own = vars(norm)
    before = next(value for value in own["_parameters"].values() if value is not None).numel()
    vars(new).update(own)
    vars(new).update(_sizes(own, before, size), _parameters={**own["_parameters"], **values})
    bind_methods(new, norm)
    return new


def _sizes(attributes: dict[str, Any], before: int, size: int) -> dict[str, Any]:
    """Those attributes that are a number of units, or a shape of that alone, as another; not a temperature of 32."""
    named = {name: value for name, value in attributes.items() if SIZE.search(name.lower())}
    numbers = {name: size for name, value in named.items() if type(value) is int and value == before}
    shapes = {
        name: type(value)([size])
        for name, value in named.items()
        if isinstance(value, tuple | list) and list(value) == [before]
    }
    return numbers | shapes


def _empty(ordinary: type[nn.Module], shifts: tuple[str, ...], unit_dim: int) -> OwnNorm:
    cls = own_norm_class(ordinary, shifts, unit_dim)
    return cls.__new__(cls)


@functools.cache
def own_norm_class(ordinary: type[nn.Module], shifts: tuple[str, ...], unit_dim: int) -> type[OwnNorm]:
    """A subclass of a type of norm, of the same name, whose units lie along a dimension of what it takes and gives."""
    return class_of(OwnNorm, ordinary, (), shifts, (), {"unit_dim": unit_dim})


def unit_dim_of(norm: nn.Module, x: Tensor) -> int | None:
    """Along which dimension of x a module norms units, if it does and computes with fewer of them too; else None.

    Example:
        >>> import torch
        >>> unit_dim_of(nn.LayerNorm(4), torch.randn(2, 3, 4))
        -1
    """
    own = [parameter for parameter in norm._parameters.values() if parameter is not None]
    size = own[0].numel() if own else 0
    is_norm = "norm" in type(norm).__name__.lower() and not norm._modules and not norm._buffers
    if not is_norm or size < 2 or any(parameter.shape != (size,) for parameter in own):
        return None
    for dim in (-1, 1):
        if x.dim() > 1 and x.shape[dim] == size:
            values = {name: p if p is None else p[: size - 1] for name, p in norm._parameters.items()}
            few = x.narrow(dim, 0, size - 1)
            try:
                y = of_size(norm, type(norm), size - 1, values).forward(few)
            except Exception:  # whatever its code raises where the sizes are not its own
                return None
            return dim if isinstance(y, Tensor) and y.shape == few.shape else None
    return None
