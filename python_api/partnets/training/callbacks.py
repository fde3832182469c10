"""Callbacks of a Trainer: functions of the trainer, called after each step; metrics they return go into History.

    evaluate = every(100, lambda trainer: {"test accuracy": partnets.accuracy(trainer.model, test)})
    keep = every(1000, lambda trainer: trainer.save("checkpoint.pt"))
    partnets.Trainer(model, chunks, callbacks=[evaluate, keep])

Random states are restored after callbacks, so the frequency of evaluations does not affect training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from partnets.utils.checks import check_at_least

# A function of a Trainer, which returns metrics to record or None.
Callback = Callable[[Any], dict[str, float] | None]


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
