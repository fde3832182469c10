"""linearised: passes linear in a perturbation of the weights, by forward-mode differentiation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from partnets.utils.in_thread import InThread, holding
from partnets.utils.twice import twice_differentiable

_linearising = InThread()


@contextmanager
def linearised() -> Iterator[None]:
    """Activate `perturbation` and `lifted` in the context, for this thread."""
    # Fused attention and weight norm have no forward mode.
    with holding({_linearising: True}), forward_ad.dual_level(), twice_differentiable(), _OutOfPlace():
        yield


class _OutOfPlace(TorchDispatchMode):
    """Makes PyTorch compute tangents out of place: those of softmax and logsumexp overwrite a tensor of the graph."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


def perturbation(x: Tensor) -> Tensor:
    """Return 0 with x as its tangent inside `linearised`; otherwise x."""
    return x if _linearising.get() is None else forward_ad.make_dual(x.new_zeros(()).expand_as(x).clone(), x)


def lifted(x: Tensor) -> Tensor:
    """Return the sum of x's primal value and its tangent inside `linearised`; otherwise x."""
    if _linearising.get() is None or not isinstance(x, Tensor):
        return x
    value, derivative = forward_ad.unpack_dual(x)
    return x if derivative is None else value + derivative


def is_linear(x: Tensor) -> bool:
    """Return whether x has a tangent, because it depends on a `perturbation`."""
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None
