"""Trainer: learns the weights and the hyperparameters of a partitioned network together (Appendix I.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from partkernels.defaults import check_seed
from partnets import checkpoint, optim
from partnets.chunks import Chunks, check_batch_size
from partnets.history import History
from partnets.hyper import Hyperparameter, hyperparameters
from partnets.lml import check_counts, check_unseen, lml
from partnets.progress import Progress
from partnets.subnetwork import subnetwork


class Trainer:
    """Alternates steps of the partitions w_k (Eq. 3) and of the hyperparameters ψ (Eq. 4), as in Appendix I.1.

    What it does in a step can be written by hand:

        k = 1 + int(torch.multinomial(u, 1))                        # u: chunks.proportions
        x, y = chunks.sample_upto(k, batch_size)
        with partnets.subnetwork(model, active=k, update=k):
            loss(model(x), y).backward()
        optimizer.step(update=k)                                    # and zero_grad()

        k = 2 + int(torch.multinomial(u[1:], 1))
        x, y = chunks.sample(k, batch_size)
        with partnets.subnetwork(model, active=k - 1):
            loss(model(x), y).backward()
        hyper_optimizer.step()                                      # and zero_grad()

    While one of the two is updated, the other requires no gradient and none is computed. Batches go to the model's
    device. Chunks and batches are drawn by a generator of the trainer's own; the model's noise comes from torch's.

    Args:
        model: partitioned, with as many partitions as there are chunks.
        chunks: of (x, y) examples.
        hyper: ψ: a module of partnets.hyper, or several, inside the model; None for steps of w alone.
        loss: loss(output, y), the mean negative log-likelihood per example in nats, as torch's criteria return it.
        optimizer: of partnets.optim, of this model; Adam with a learning rate of 1e-3 if None.
        hyper_optimizer: of torch.optim, of the parameters of hyper; Adam with a learning rate of 1e-3 if None.
        batch_size, hyper_batch_size: examples in a step of w and of ψ; the latter as the former if None.
        lml_every: evaluates L_ML in full each time that so many steps are done; None never does.
        seed: an int in [0, 2**63) of the trainer's generator.

    Attributes:
        history: the History of all steps.
        generator: of the draws of chunks and batches.

    Raises:
        ValueError: the model and the chunks differ in C, hyper is not inside the model, an optimiser belongs to other
            parameters, or a number is out of range.

    Example:
        >>> import partnets
        >>> from partnets import hyper
        >>> x = torch.randn(60, 4)
        >>> mask = hyper.InputMask(4)
        >>> model = partnets.partition(nn.Sequential(mask, nn.Linear(4, 2)), (0.8, 0.2))
        >>> chunks = partnets.chunk((x, (x[:, 0] > 0).long()), (0.8, 0.2))
        >>> history = Trainer(model, chunks, hyper=mask, batch_size=16, lml_every=10).fit(20)
        >>> history.lml["step"], sorted(history.values)
        ([10, 20], ['0.0', '0.1', '0.2', '0.3'])
    """

    def __init__(
        self,
        model: nn.Module,
        chunks: Chunks,
        *,
        hyper: Hyperparameter | Sequence[Hyperparameter] | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
        optimizer: optim.PartitionedOptimizer | None = None,
        hyper_optimizer: torch.optim.Optimizer | None = None,
        batch_size: int = 128,
        hyper_batch_size: int | None = None,
        lml_every: int | None = None,
        seed: int = 0,
    ) -> None:
        check_counts(model, chunks)
        check_batch_size(batch_size)
        hyper_batch_size = batch_size if hyper_batch_size is None else hyper_batch_size
        check_batch_size(hyper_batch_size)
        check_seed("seed", seed)
        if lml_every is not None and lml_every < 1:
            raise ValueError(f"lml_every={lml_every}; pass a number of steps, at least 1, or None.")
        self.hyper = _find_hyper(model, hyper)
        if self.hyper or lml_every:
            check_unseen(chunks)
        psi = [parameter for module in self.hyper.values() for parameter in module.parameters()]

        self.model, self.chunks, self.loss = model, chunks, loss
        self.optimizer = optim.Adam(model) if optimizer is None else optimizer
        self.hyper_optimizer = hyper_optimizer
        if psi and hyper_optimizer is None:
            self.hyper_optimizer = torch.optim.Adam(psi, lr=1e-3)
        _check_optimizers(model, self.optimizer, psi, self.hyper_optimizer)
        self.batch_size, self.hyper_batch_size, self.lml_every = batch_size, hyper_batch_size, lml_every
        self.generator = torch.Generator().manual_seed(seed)
        self.history = History()

    @property
    def steps(self) -> int:
        """How many steps are done."""
        return len(self.history.steps["step"])

    @property
    def device(self) -> torch.device:
        """The model's."""
        return next(self.model.parameters()).device

    def fit(self, steps: int) -> History:
        """Trains for so many more steps, in training mode; on a terminal it shows progress.

        Modules with running statistics, which partnets.partition left out, stay in evaluation mode: otherwise they
        would carry D_k into earlier subnetworks.

        Raises:
            ValueError: steps is negative.
        """
        if steps < 0:
            raise ValueError(f"steps={steps}; pass how many more steps to take.")
        self.model.train()
        for module in self.model.modules():
            if isinstance(module, _NormBase):
                module.eval()
        with Progress(self.steps, steps) as progress:
            for _ in range(steps):
                self.step()
                progress.update(self.history)
        return self.history

    def step(self) -> None:
        """One iteration of Appendix I.1, and its record."""
        k, loss = self.step_weights()
        hyper_k, hyper_loss = self.step_hyper() if self.hyper else (None, None)
        self.history.add(self.steps + 1, k, loss, hyper_k, hyper_loss, self.values())
        if self.lml_every and self.steps % self.lml_every == 0:
            self.history.add_lml(self.steps, lml(self.model, self.chunks, self.loss, batch_size=self.batch_size))

    def step_weights(self) -> tuple[int, float]:
        """Updates w_k on a batch from D_1:k, with k ~ Cat(u_1..u_C); returns k and the loss."""
        k = self._draw_chunk(first=1)
        batch = self.chunks.sample_upto(k, self.batch_size, self.generator)
        self.optimizer.zero_grad()
        with subnetwork(self.model, active=k, update=k), frozen(hyperparameters(self.model)):
            loss = self._loss(batch)
            loss.backward()
        self.optimizer.step(update=k)
        return k, loss.item()

    def step_hyper(self) -> tuple[int, float]:
        """Updates ψ on a batch from D_k, unseen by subnetwork k - 1, with k ~ Cat(u_2..u_C); returns k and the loss."""
        k = self._draw_chunk(first=2)
        batch = self.chunks.sample(k, self.hyper_batch_size, self.generator)
        self.hyper_optimizer.zero_grad()
        with subnetwork(self.model, active=k - 1, update=None):
            loss = self._loss(batch)
            if loss.requires_grad:  # otherwise ψ reaches nothing, which is reported below
                loss.backward()
        self._check_reached()
        self.hyper_optimizer.step()
        return k, loss.item()

    def values(self) -> dict[str, float]:
        """The present value of each hyperparameter that is trained, in its units, under its module's path."""
        return {
            f"{path}.{name}" if path else name: value
            for path, module in self.hyper.items()
            for name, value in module.values().items()
        }

    def save(self, path: str | PathLike) -> None:
        """Writes a checkpoint, from which `load` resumes with the same bits; whole or not at all."""
        checkpoint.save(self, path)

    def load(self, path: str | PathLike) -> None:
        """Resumes from a checkpoint: weights, partitions, ψ, optimisers, random states and history.

        Raises:
            ValueError: the file is no checkpoint, or that of another model, other chunks, optimisers or batch sizes;
                nothing has changed then.
        """
        checkpoint.load(self, path)

    def _draw_chunk(self, first: int) -> int:
        u = torch.tensor(self.chunks.proportions[first - 1 :], device="cpu")
        return first + int(torch.multinomial(u, 1, generator=self.generator))

    def _loss(self, batch: Sequence[Tensor]) -> Tensor:
        x, y = (part.to(self.device) for part in batch)
        return self.loss(self.model(x), y)

    def _check_reached(self) -> None:
        unreached = [
            f"{path}.{name}" if path else name
            for path, module in self.hyper.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        ]
        if unreached:
            raise RuntimeError(
                f"the loss gives {', '.join(unreached)} no gradient; use it in the model's forward, without detaching,"
                " or leave it out of hyper."
            )


@contextmanager
def frozen(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, these parameters require no gradient; afterwards they do as before."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def _find_hyper(model: nn.Module, hyper) -> dict[str, Hyperparameter]:
    """The path and module of each hyperparameter module."""
    modules = [] if hyper is None else [hyper] if isinstance(hyper, nn.Module) else list(hyper)
    paths = {module: path for path, module in model.named_modules()}
    for module in modules:
        if not isinstance(module, Hyperparameter):
            raise ValueError(
                f"hyper has a {type(module).__name__}; derive it from partnets.hyper.Hyperparameter, so that"
                " partnets.partition and the optimisers tell it from the weights."
            )
        if module not in paths:
            raise ValueError(
                f"hyper has a {type(module).__name__} that is not inside the model; build the model with it, as in"
                " nn.Sequential(hyper, network)."
            )
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError(f"hyper has {paths[module]}, without a trainable parameter; leave it out of hyper.")
    return {paths[module]: module for module in modules}


def _check_optimizers(model, optimizer, psi, hyper_optimizer) -> None:
    if not isinstance(optimizer, optim.PartitionedOptimizer):
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__}, which steps all partitions at once; pass one of"
            " partnets.optim."
        )
    if not set(optimizer.parameters()) <= set(model.parameters()):
        raise ValueError("optimizer has parameters of another model; construct it with the trainer's model.")
    if hyper_optimizer is None:
        return
    trained = {parameter for group in hyper_optimizer.param_groups for parameter in group["params"]}
    if trained != {parameter for parameter in psi if parameter.requires_grad}:
        raise ValueError("hyper_optimizer has other parameters than hyper; construct it with hyper.parameters().")
