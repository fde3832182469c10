"""The checks of stn.Trainer before its first step: layers know the examples, and all of λ is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator

from partnets.evaluation.snapshot import Snapshot
from partnets.hyper import Learned, penalties
from partnets.optim.base import check_held
from partnets.stn.converting import vector_of
from partnets.stn.step import count_examples
from partnets.stn.vector import HyperVector
from partnets.training.trainer import Trainer
from partnets.utils.eager import eagerly
from partnets.utils.losses import mean
from partnets.utils.modules import evaluating, to_device
from partnets.utils.random_state import preserved

# Sizes of the trial batches; two of them, so that no other dimension has the size of both.
SIZES = 2, 3
# The number of batches within which every hyperparameter must be read, even if not every batch reads it.
TRIES = 16


def check_start(trainer: Trainer) -> None:
    """Raise ValueError if layers get other examples than the batch's, or a hyperparameter is not read."""
    vector, before = vector_of(trainer.model), Snapshot(trainer.model)
    check_held(trainer.model)
    learns = {one for module in trainer.hyper.values() for one in module.modules() if isinstance(one, Learned)}
    names = {one: name for one, name in zip(vector.learned, vector.names, strict=True) if one in learns}
    try:
        with preserved(trainer.device), torch.no_grad(), eagerly(), vector.noting() as read:
            for size in SIZES:
                _train(trainer, vector, _drawn(trainer, size, 0))
            for seed in range(1, 1 + TRIES):
                if read.issuperset(names):
                    break
                batch = _drawn(trainer, SIZES[-1], seed)
                _train(trainer, vector, batch)
                with evaluating(trainer.model), vector.perturbed(count_examples(batch, vector.batch_dim)):
                    mean(trainer.hyper_loss, *trainer.forward(trainer.model, batch))
    finally:
        before.put_back()
    if unread := [name for one, name in names.items() if one not in read]:
        raise ValueError(
            f"in training nothing reads {', '.join(unread)}: its module is not called, is in evaluation mode, belongs"
            " to a layer that stn.convert left unchanged, or is a loss that is not passed as loss=. Correct this, or"
            " leave it out of stn.convert."
        )


def _drawn(trainer: Trainer, examples: int, seed: int) -> Any:
    return to_device(trainer.chunks.sample(1, examples, Generator().manual_seed(seed)), trainer.device)


def _train(trainer: Trainer, vector: HyperVector, batch: Any) -> None:
    """Compute the loss of a step of the weights; layers raise if their dimension of examples is another one."""
    # Penalties are computed only with gradients enabled.
    with vector.perturbed(count_examples(batch, vector.batch_dim)), torch.enable_grad(), penalties():
        mean(trainer.loss, *trainer.forward(trainer.model, batch))
