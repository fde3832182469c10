"""linearised: a pass whose outputs are linear in a perturbation of the weights, by forward-mode differentiation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd import forward_ad

from partnets.utils.in_thread import InThread, holding
from partnets.utils.twice import twice_differentiable

_linearising = InThread()


@contextmanager
def linearised() -> Iterator[None]:
    """Inside, in this thread, `perturbation` and `lifted` act."""
    # Neither fused attention nor weight norm has a forward mode.
    with holding({_linearising: True}), forward_ad.dual_level(), twice_differentiable():
        yield


def perturbation(x: Tensor) -> Tensor:
    """0, with x as its direction, inside of `linearised`; else x itself."""
    return x if _linearising.get() is None else forward_ad.make_dual(x.new_zeros(()).expand_as(x).clone(), x)


def lifted(x: Tensor) -> Tensor:
    """A function's value at 0 and its derivative in the direction together, inside of `linearised`; else x itself."""
    if _linearising.get() is None or not isinstance(x, Tensor):
        return x
    value, derivative = forward_ad.unpack_dual(x)
    return x if derivative is None else value + derivative


def is_linear(x: Tensor) -> bool:
    """Whether x has a direction, as what depends on a `perturbation`."""
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None
