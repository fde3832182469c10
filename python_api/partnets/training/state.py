"""TrainingState: the state of a training, which callbacks read and checkpoints save."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from partnets.data.batch import Forward, Loss
from partnets.data.chunks import Chunks
from partnets.evaluation import estimate_statistics
from partnets.hyper.hyperparameter import Hyperparameter, values_by_path
from partnets.optim import PartitionedOptimizer
from partnets.training.best_model import Best
from partnets.training.history import History
from partnets.utils.modules import device_of


class TrainingState:
    """The state of a Trainer: the model and data, settings and progress.

    Attributes:
        model, chunks, loss, hyper_loss, forward, optimizer, hyper_optimizer, scheduler, hyper_scheduler: as in Trainer.
        loading: options of a DataLoader; empty if batches are not fetched ahead.
        hyper: the path and the module of each trained hyperparameter.
        history: the History of all steps.
        generator: the generator that draws chunks and batches.
        best: the step, L_ML and state that keep_best has kept; None without keep_best.
        noise: while callbacks run, the random states with which training will continue; otherwise None.
        hyper_gradient: for each module of hyper, by path, a partnets.Lookahead or Implicit; None if direct.
        batch_size, hyper_batch_size, sampling, clip, hyper_every, hyper_steps, hyper_after, hyper_chunks, one_pass,
            patience: as in Trainer.
    """

    model: nn.Module
    chunks: Chunks
    loss: Loss
    hyper_loss: Loss
    forward: Forward
    loading: dict[str, Any]
    optimizer: PartitionedOptimizer
    hyper_optimizer: torch.optim.Optimizer | None
    scheduler: LRScheduler | None
    hyper_scheduler: LRScheduler | None
    hyper: dict[str, Hyperparameter]
    history: History
    generator: torch.Generator
    best: Best | None
    noise: dict | None
    batch_size: int
    hyper_batch_size: int
    sampling: tuple[float, ...]
    clip: float | None
    hyper_every: int
    hyper_steps: int
    hyper_after: int
    hyper_chunks: str
    one_pass: bool
    hyper_gradient: dict[str, Any]
    patience: int | None

    @property
    def steps(self) -> int:
        """Return the number of completed steps."""
        return len(self.history.steps["step"])

    @property
    def device(self) -> torch.device:
        """Return the model's device."""
        return device_of(self.model)

    @property
    def exhausted(self) -> bool:
        """Return whether the last `patience` evaluations gave no higher L_ML."""
        if self.patience is None:
            return False
        best = self.history.best_lml()
        return sum(step > (best[0] if best else 0) for step in self.history.lml["step"]) >= self.patience

    def settings(self) -> dict[str, Any]:
        """Return further settings of a subclass that must be the same to resume from a checkpoint."""
        return {}

    def values(self) -> dict[str, float]:
        """Return the present value of each trained hyperparameter in its units, by its module's path."""
        return values_by_path(self.hyper)

    @property
    def evaluating(self) -> dict[str, Any]:
        """Return the arguments of partnets.lml and loss_matrix that evaluate as this training does."""
        return {"batch_size": self.batch_size, "forward": self.forward, **self.loading}

    def estimate_statistics(self) -> None:
        """Call partnets.estimate_statistics on the model; this does not change any bit of further training.

        Call it in a callback before evaluating a model with BatchNorm.
        """
        estimate_statistics(self.model, self.chunks, other_chunks=True, **self.evaluating)  # chunks are checked already

    def restore_best(self) -> float:
        """Restore the model, including ψ, to the state with the highest L_ML, and return this L_ML in nats.

        The optimisers are left unchanged, so call this at the end of training.

        Raises:
            ValueError: the trainer keeps no best state, or has not evaluated L_ML.
        """
        if self.best is None:
            raise ValueError("this trainer keeps no best state; construct it with keep_best=True and lml_every.")
        self.best.restore(self.model)
        return self.best.lml
