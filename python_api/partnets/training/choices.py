"""sweep: comparison of choices that have no gradient by L_ML, with one training each."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from partnets.evaluation import lml
from partnets.evaluation.same_chunks import has_learned
from partnets.training.trainer import Trainer
from partnets.utils.likelihood import Loss, name_of
from partnets.utils.random_state import preserved


@dataclass(frozen=True)
class Sweep:
    """The result of a sweep.

    Attributes:
        tried: each choice and its L_ML in nats, in order; minus infinity if a loss was not finite.
        best: the choice with the highest L_ML.
        trainer: the trainer of this choice; the others are not kept.
    """

    tried: list[tuple[Any, float]]
    best: Any
    trainer: Trainer


def sweep(make: Callable[[Any], Trainer], choices: Iterable, steps: int, *, seed: int = 0) -> Sweep:
    """Train once for each choice and compare L_ML, as an estimate of the marginal likelihood (Section 3).

    Use it for discrete choices, such as a depth or an optimiser, and for settings that act only through the training
    loss, such as label smoothing or a penalty, which have a gradient of 0 on unseen data. Hyperparameters with a
    gradient are learned in a single training instead.

    All trainings must have the same chunks and likelihood, as L_ML could not be compared otherwise. They start from the
    same random state of torch. A trainer with keep_best is evaluated, and left, at its best state.

    Args:
        make: make(choice) returns a Trainer that has not trained yet.
        choices: any values.
        steps: the number of steps of each training.
        seed: the seed of torch's random state before each `make` and during evaluation.

    Raises:
        ValueError: there is no choice, a trainer has other chunks or another hyper_loss than the first, or a model has
            learned already.
        FloatingPointError: no choice has a loss that stays finite.
        TypeError: make did not return a Trainer.

    Example:
        >>> import functools, partnets
        >>> from torch import nn
        >>> x = torch.randn(60, 4)
        >>> chunks = partnets.chunk((x, (x[:, 0] > 0).long()), (0.8, 0.2))
        >>> def make(smoothing):
        ...     model = partnets.partition(nn.Linear(4, 2), (0.8, 0.2))
        ...     loss = functools.partial(nn.functional.cross_entropy, label_smoothing=smoothing)
        ...     return Trainer(model, chunks, loss=loss, batch_size=16)
        >>> found = sweep(make, [0.0, 0.5], steps=20)
        >>> [choice for choice, _ in found.tried], found.best in (0.0, 0.5)
        ([0.0, 0.5], True)
    """
    tried, first, best = [], None, None
    for choice in choices:
        with preserved(torch.device("cpu")):
            torch.manual_seed(seed)
            trainer = make(choice)
            if not isinstance(trainer, Trainer):
                raise TypeError(f"make({choice!r}) returned a {type(trainer).__name__}; return a partnets.Trainer.")
            first = first or trainer
            if not first.chunks.is_of(trainer.chunks.fingerprint):
                raise ValueError(
                    f"make({choice!r}) has other chunks than the choice before, so their L_ML cannot be compared; call"
                    " partnets.chunk once, outside of make."
                )
            if has_learned(trainer.model):
                raise ValueError(f"make({choice!r}) has a model that has learned already; make a new one each time.")
            if not same_loss(trainer.hyper_loss, first.hyper_loss):
                raise ValueError(
                    f"make({choice!r}) has another hyper_loss than the choice before, so their L_ML cannot be compared;"
                    " pass one hyper_loss= to all trainers, the negative log-likelihood."
                )
            found = _trained(trainer, steps, seed)
        if found > max((value for _, value in tried), default=-math.inf):
            best = trainer
        tried.append((choice, found))
    if not tried:
        raise ValueError("there is no choice to try; pass at least one.")
    if best is None:
        raise FloatingPointError(f"none of {len(tried)} choices has a loss that stays finite; lower the learning rate.")
    return Sweep(tried, max(tried, key=lambda each: each[1])[0], best)


def _trained(trainer: Trainer, steps: int, seed: int) -> float:
    """Train and return L_ML, of the best state if the trainer keeps one; minus infinity if a loss is not finite."""
    try:
        trainer.fit(steps)
    except FloatingPointError:
        return -math.inf
    if trainer.best is not None and trainer.history.best_lml():
        trainer.restore_best()
    found = lml(trainer.model, trainer.chunks, trainer.hyper_loss, seed=seed, **trainer.evaluating)
    return -math.inf if math.isnan(found) else found


def same_loss(first: Loss, second: Loss) -> bool:
    """Return whether two losses are the same object, or losses of torch with the same settings.

    Example:
        >>> same_loss(nn.CrossEntropyLoss(), nn.CrossEntropyLoss()), same_loss(nn.CrossEntropyLoss(), nn.MSELoss())
        (True, False)
        >>> same_loss(F.cross_entropy, functools.partial(F.cross_entropy, label_smoothing=0.0))
        True
    """
    if first is second or first == second:
        return True
    name = name_of(first)
    return bool(name) and name == name_of(second) and _settings(first) == _settings(second)


def _settings(loss: Loss) -> dict[str, str]:
    """Return the arguments of one of torch's losses, as text."""
    if isinstance(loss, nn.Module):
        found = {**vars(loss), **loss._buffers}
    else:
        bound = inspect.signature(loss.func if isinstance(loss, functools.partial) else loss).parameters.values()
        usual = {parameter.name: parameter.default for parameter in bound if parameter.default is not parameter.empty}
        found = usual | getattr(loss, "keywords", {})
    return {name: repr(value) for name, value in found.items() if not name.startswith("_")}
