"""TrainingState: where a training is, which callbacks look at and checkpoints save."""

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
    """What a Trainer trains, with what, and how far it is.

    Attributes:
        model, chunks, loss, hyper_loss, forward, optimizer, hyper_optimizer, scheduler, hyper_scheduler: as of Trainer.
        loading: a DataLoader's options, empty where batches are fetched as they are needed.
        hyper: the path and the module of each hyperparameter that is trained.
        history: the History of all steps.
        generator: of the draws of chunks and batches.
        best: the step, L_ML and state that keep_best kept; None where nothing is kept.
        noise: while callbacks run, the random states from which training goes on after them; otherwise None.
        hyper_gradient: of each module of hyper, by its path, a partnets.Lookahead or Implicit; None if it is direct.
        batch_size, hyper_batch_size, sampling, clip, hyper_every, hyper_steps, hyper_after, hyper_chunks, one_pass,
            patience: as of Trainer.
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
        """How many steps are done."""
        return len(self.history.steps["step"])

    @property
    def device(self) -> torch.device:
        """The model's."""
        return device_of(self.model)

    @property
    def exhausted(self) -> bool:
        """Whether `patience` evaluations in a row brought no higher L_ML."""
        if self.patience is None:
            return False
        best = self.history.best_lml()
        return sum(step > (best[0] if best else 0) for step in self.history.lml["step"]) >= self.patience

    def settings(self) -> dict[str, Any]:
        """What a kind of trainer has besides, and must have alike to go on where another one was."""
        return {}

    def values(self) -> dict[str, float]:
        """The present value of each hyperparameter that is trained, in its units, under its module's path."""
        return values_by_path(self.hyper)

    @property
    def evaluating(self) -> dict[str, Any]:
        """How this training evaluates: the arguments of partnets.lml and loss_matrix for its batches."""
        return {"batch_size": self.batch_size, "forward": self.forward, **self.loading}

    def estimate_statistics(self) -> None:
        """partnets.estimate_statistics of the model: training goes on to the same bits, with them or without.

        Call it in a callback before anything that judges a model with BatchNorm.
        """
        estimate_statistics(self.model, self.chunks, other_chunks=True, **self.evaluating)  # which it has checked

    def restore_best(self) -> float:
        """Sets the model, ψ included, to where L_ML was highest, and returns that L_ML, in nats.

        The optimisers stay where they are: this is for the end of training. What modules that were named in
        partnets.partition(..., stateful=) keep in attributes stays too, with a warning if there are tensors.

        Raises:
            ValueError: the trainer keeps no best state, or has evaluated none.
        """
        if self.best is None:
            raise ValueError("this trainer keeps no best state; construct it with keep_best=True and lml_every.")
        self.best.restore(self.model)
        return self.best.lml
