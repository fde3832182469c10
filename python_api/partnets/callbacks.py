"""Callbacks of a Trainer: any function of the trainer, called after each step; what it returns goes into History.

    evaluate = every(100, lambda trainer: {"test accuracy": partnets.accuracy(trainer.model, test)})
    keep = every(1000, lambda trainer: trainer.save("checkpoint.pt"))
    partnets.Trainer(model, chunks, callbacks=[evaluate, every(500, record_loss_matrix), keep])

Torch's random state is afterwards as it was, so that to evaluate more often changes nothing of the training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from partnets.evaluation import loss_matrix

if TYPE_CHECKING:
    from partnets.trainer import Trainer

Callback = Callable[["Trainer"], "dict[str, float] | None"]


def every(steps: int, callback: Callback) -> Callback:
    """A callback that calls another after each so many steps.

    Raises:
        ValueError: steps is below 1.

    Example:
        >>> from types import SimpleNamespace
        >>> callback = every(10, lambda trainer: {"step": trainer.steps})
        >>> [callback(SimpleNamespace(steps=step)) for step in (9, 10)]
        [None, {'step': 10}]
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r}; pass an int, at least 1.")
    return lambda trainer: callback(trainer) if trainer.steps % steps == 0 else None


def record_loss_matrix(trainer: Trainer) -> None:
    """Appends the mean loss of each subnetwork on each chunk to the trainer's history."""
    matrix = loss_matrix(trainer.model, trainer.chunks, trainer.loss, batch_size=trainer.batch_size)
    trainer.history.add_matrix(trainer.steps, matrix.tolist())
