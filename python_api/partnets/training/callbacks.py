"""Callbacks of a Trainer: functions of the trainer, called after each step; metrics they return go into History.

    evaluate = every(100, lambda trainer: {"test accuracy": partnets.accuracy(trainer.model, test)})
    each = every(500, subnetwork_metrics("test accuracy", lambda model: partnets.accuracy(model, test)))
    keep = every(1000, lambda trainer: trainer.save("checkpoint.pt"))
    partnets.Trainer(model, chunks, callbacks=[evaluate, each, every(500, record_loss_matrix), keep])

Random states are restored after callbacks, so the frequency of evaluations does not affect training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

from partnets.evaluation.metrics import loss_matrix, per_subnetwork
from partnets.utils.checks import check_at_least

if TYPE_CHECKING:
    from partnets.training.trainer import Trainer

Callback = Callable[["Trainer"], dict[str, float] | None]


def every(steps: int, callback: Callback) -> Callback:
    """Return a callback that calls another one every `steps` steps.

    Raises:
        ValueError: steps is below 1.

    Example:
        >>> from types import SimpleNamespace
        >>> callback = every(10, lambda trainer: {"step": trainer.steps})
        >>> [callback(SimpleNamespace(steps=step)) for step in (9, 10)]
        [None, {'step': 10}]
    """
    check_at_least(1, steps=steps)
    return lambda trainer: callback(trainer) if trainer.steps % steps == 0 else None


def record_loss_matrix(trainer: Trainer) -> None:
    """Append the mean loss of each subnetwork on each chunk to the trainer's history."""
    matrix = loss_matrix(trainer.model, trainer.chunks, trainer.hyper_loss, **trainer.evaluating)
    trainer.history.add_matrix(trainer.steps, matrix.tolist())


def subnetwork_metrics(name: str, metric: Callable[[nn.Module], float]) -> Callback:
    """Return a callback that records a metric of each subnetwork, as "NAME, subnetwork 1" to "NAME, subnetwork C".

    Example:
        >>> import torch, partnets
        >>> model = partnets.Linear(2, 2, proportions=(0.5, 0.5), seed=0)
        >>> chunks = partnets.chunk((torch.randn(8, 2), torch.randint(2, (8,))), (0.5, 0.5))
        >>> test = torch.randn(20, 2), torch.randint(2, (20,))
        >>> report = subnetwork_metrics("test accuracy", lambda model: partnets.accuracy(model, test))
        >>> list(partnets.Trainer(model, chunks, callbacks=[report]).fit(1).metrics)
        ['test accuracy, subnetwork 1', 'test accuracy, subnetwork 2']
    """

    def callback(trainer: Trainer) -> dict[str, float]:
        trainer.estimate_statistics()
        values = per_subnetwork(trainer.model, metric)
        return {f"{name}, subnetwork {k}": value for k, value in enumerate(values, start=1)}

    return callback
