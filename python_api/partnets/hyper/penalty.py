"""Penalty: what regularises training by a term of its own in the loss."""

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
    """Inside, in this thread, Penalty modules append their terms of the training loss to this list: add their means.

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
    """Inside, in this thread, what Penalty modules append counts by so much.

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
    """A loss with what hyper.Penalty modules gave meanwhile: the mean of each.

    Example:
        >>> with_terms(torch.tensor(1.0), [torch.tensor([2.0, 4.0])])
        tensor(4.)
    """
    return loss + sum(penalty.mean() for penalty in found)


def penalised(loss: Callable[[Any], Tensor], batch: Any) -> tuple[Tensor, Tensor]:
    """The loss of a batch, and with it all that hyper.Penalty modules give meanwhile.

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
    """Whether a checkpoint computes a part anew by hooks; a reentrant one has none, and gathered nothing before."""
    return torch._C._current_graph_task_id() != -1 and _top_saved_tensors_default_hooks(False) is not None


class Penalty(Hyperparameter):
    """The base class of layers that pass x through, and in training add a term to the loss: `penalty(x)`.

    Trainers add it; in loops of your own do so inside of hyper.penalties. It acts on training alone, so that ψ cannot
    learn it from unseen data through the forward pass: partnets.Trainer looks ahead for it, and partnets.stn learns it
    through the best response.

    Raises:
        RuntimeError: in training, where a gradient is computed, nobody gathers what it gives.
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
                    " `with hyper.penalties() as found`, and add the mean of each to it; partnets.step_weights and"
                    " trainers do so. Activation checkpoints around it need use_reentrant=False."
                )
            found.append(lifted(self.penalty(lifted(x))))
        return x

    def penalty(self, x: Tensor) -> Tensor:
        """The term for x, of which the mean counts: of any shape."""
        raise NotImplementedError(f"{type(self).__name__} has no penalty(x); define it.")
