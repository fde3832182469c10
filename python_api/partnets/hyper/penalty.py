"""Penalty and ActivationPenalty: layers that add a term to the training loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from partnets.hyper.hyperparameter import Hyperparameter
from partnets.hyper.learned import Learned
from partnets.hyper.ranges import Range, positive
from partnets.utils.in_thread import InThread, holding
from partnets.utils.linearised import lifted

_gathering = InThread()


@contextmanager
def penalties() -> Iterator[list[Tensor]]:
    """Collect the terms of Penalty modules in this thread in a list; the caller adds their means to the training loss.

    Example:
        >>> penalty = ActivationPenalty(2.0)
        >>> with penalties() as found:
        ...     x = penalty(torch.ones(3, 4))
        >>> found[0].mean().item()
        2.0
    """
    found: list[Tensor] = []
    with holding({_gathering: found}):
        yield found


@contextmanager
def weighed_penalties(weight: float) -> Iterator[None]:
    """Multiply the terms that Penalty modules add inside this context, in this thread, by a weight."""
    found = _gathering.get()
    start = len(found or ())
    yield
    if found is not None:
        found[start:] = [weight * term for term in found[start:]]


def with_terms(loss: Tensor, found: list[Tensor]) -> Tensor:
    """Return a loss plus the mean of each term that hyper.Penalty modules added."""
    return loss + sum(penalty.mean() for penalty in found) if found else loss


def penalised(loss: Callable[[Any], Tensor], batch: Any) -> tuple[Tensor, Tensor]:
    """Return the loss of a batch, without and with the terms that hyper.Penalty modules add."""
    with penalties() as found:
        value = loss(batch)
    return value, with_terms(value, found)


class Penalty(Hyperparameter):
    """The base class of layers that pass x through and add a term, `penalty(x)`, to the training loss.

    Trainers add the term; in custom training loops, use hyper.penalties. The penalty acts only in training, so ψ has
    no gradient through the forward pass of held-out data: partnets.Trainer learns it by lookahead, partnets.stn through
    the best response.

    Raises:
        RuntimeError: in training, a gradient is computed outside of hyper.penalties, as activation checkpoints do.
    """

    hyper_gradient = "lookahead"

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            found = _gathering.get()
            if found is None:
                raise RuntimeError(
                    f"the penalty of this {type(self).__name__} would be lost: compute the loss inside of"
                    " `with hyper.penalties() as found` and add the mean of each term, as partnets.step_weights and the"
                    " trainers do. Keep it out of activation checkpoints."
                )
            found.append(lifted(self.penalty(lifted(x))))
        return x

    def to_torch(self) -> nn.Module:
        """Return nn.Identity()."""
        return nn.Identity()

    def penalty(self, x: Tensor) -> Tensor:
        """Return the term for x, of any shape; its mean is added to the loss."""
        raise NotImplementedError(f"{type(self).__name__} has no penalty(x); define it.")


class ActivationPenalty(Penalty):
    """A penalty of α times the mean square of x, or of its changes from one time step to the next.

    These are AR and TAR of Merity et al. (2017). As in that paper, put AR behind the dropout of a recurrent layer's
    output, and TAR before it.

    Args:
        strength: the initial α.
        time_dim: the time dimension of x, to penalise changes (TAR): 1 for [batch, length, ...]; None for AR.
        range: range of α, such as hyper.logarithmic(1e-3, 10).

    Shapes:
        x [batch, ...], returned unchanged. The penalty on changes is 0 for a single time step.

    Raises:
        ValueError: strength is outside the range, or x has no dimension time_dim.
        RuntimeError: see hyper.Penalty.

    Example:
        >>> activations, changes = ActivationPenalty(2.0), ActivationPenalty(2.0, time_dim=1)
        >>> with penalties() as found:
        ...     x = changes(activations(3 * torch.arange(2.0).view(1, 2, 1)))
        >>> [term.mean().item() for term in found]
        [9.0, 18.0]
    """

    per_example = True

    def __init__(self, strength: float = 1.0, *, time_dim: int | None = None, range: Range = positive) -> None:
        super().__init__()
        range.check("strength", strength)
        self.time_dim, self.strength = time_dim, Learned(strength, range)

    def penalty(self, x: Tensor) -> Tensor:
        if self.time_dim is None:
            return self.strength(x) * x.square()
        if not -x.dim() <= self.time_dim < x.dim():
            raise ValueError(f"x is {list(x.shape)}, without the time dimension time_dim={self.time_dim}.")
        steps = x.diff(dim=self.time_dim)
        return self.strength(x) * (steps if steps.numel() else x.new_zeros(())).square()

    def extra_repr(self) -> str:
        return "" if self.time_dim is None else f"time_dim={self.time_dim}"
