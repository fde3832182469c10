"""Penalty: a regulariser that adds its own term to the training loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks

from partnets.hyper.hyperparameter import Hyperparameter
from partnets.utils.in_thread import InThread, holding
from partnets.utils.linearised import lifted

_gathering = InThread()


@contextmanager
def penalties() -> Iterator[list[Tensor]]:
    """Collect the terms of Penalty modules in this thread in a list; the caller adds their means to the training loss.

    Example:
        >>> from partnets import hyper
        >>> penalty = hyper.ActivationPenalty(2.0)
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
    """Multiply the terms that Penalty modules add inside this context, in this thread, by a weight.

    Example:
        >>> from partnets import hyper
        >>> penalty = hyper.ActivationPenalty(2.0)
        >>> with penalties() as found, weighed_penalties(0.25):
        ...     x = penalty(torch.ones(3, 4))
        >>> found[0].mean().item()
        0.5
    """
    found = _gathering.get()
    start = len(found or ())
    yield
    if found is not None:
        found[start:] = [weight * term for term in found[start:]]


def with_terms(loss: Tensor, found: list[Tensor]) -> Tensor:
    """Return a loss plus the mean of each term that hyper.Penalty modules added.

    Example:
        >>> with_terms(torch.tensor(1.0), [torch.tensor([2.0, 4.0])])
        tensor(4.)
    """
    return loss + sum(penalty.mean() for penalty in found) if found else loss


def penalised(loss: Callable[[Any], Tensor], batch: Any) -> tuple[Tensor, Tensor]:
    """Return the loss of a batch, without and with the terms that hyper.Penalty modules add.

    Example:
        >>> from partnets import hyper
        >>> model = hyper.ActivationPenalty(2.0)
        >>> [part.item() for part in penalised(lambda x: model(x).mean(), torch.ones(3, 4))]
        [1.0, 3.0]
    """
    with penalties() as found:
        value = loss(batch)
    return value, with_terms(value, found)


def _is_computed_again() -> bool:
    """Return whether a non-reentrant checkpoint recomputes this part; a reentrant one would have gathered nothing."""
    return torch._C._current_graph_task_id() != -1 and _top_saved_tensors_default_hooks(False) is not None


class Penalty(Hyperparameter):
    """The base class of layers that pass x through and add a term, `penalty(x)`, to the training loss.

    Trainers add the term; in custom training loops, use hyper.penalties. The penalty acts only in training, so ψ has
    no gradient through the forward pass of held-out data: partnets.Trainer learns it by lookahead, partnets.stn through
    the best response.

    Raises:
        RuntimeError: in training, a gradient is computed outside of hyper.penalties.
    """

    hyper_gradient = "lookahead"

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            found = _gathering.get()
            if found is None and _is_computed_again():
                self.penalty(lifted(x))
                return x
            if found is None:
                raise RuntimeError(
                    f"the penalty of this {type(self).__name__} would be lost: compute the loss inside of"
                    " `with hyper.penalties() as found` and add the mean of each term, as partnets.step_weights and the"
                    " trainers do. Activation checkpoints around it need use_reentrant=False."
                )
            found.append(lifted(self.penalty(lifted(x))))
        return x

    def penalty(self, x: Tensor) -> Tensor:
        """Return the term for x, of any shape; its mean is added to the loss."""
        raise NotImplementedError(f"{type(self).__name__} has no penalty(x); define it.")
