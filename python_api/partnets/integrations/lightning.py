"""PartitionedModule: a LightningModule that trains weights and hyperparameters together (Appendix I.1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from partnets.data.loader import Draw, Loader
from partnets.distributed.ddp import broadcast_rows, expect, leave_buffers_alone, pack
from partnets.distributed.ranks import averaged, check_agreement, gathered, on_all_ranks, own_rank, partitions
from partnets.distributed.shared_chunks import check_shared, share
from partnets.evaluation.running_statistics import estimate_statistics
from partnets.evaluation.same_chunks import check_counts, check_same_chunks, remember_chunks
from partnets.optim import PartitionedOptimizer
from partnets.training.hypergradient import Choice, Strategy
from partnets.training.preflight import check_leaks
from partnets.training.step import parameters_of, step_weights
from partnets.training.unrolled import alone
from partnets.utils import random_state

try:
    from lightning.pytorch import LightningModule
except ImportError as error:
    raise ImportError(
        "partnets.integrations.lightning needs Lightning; pip install lightning, or partkernels' extra 'lightning'."
    ) from error


class PartitionedModule(LightningModule):
    """A base class for LightningModules with a partitioned model, trained on the draws of a partnets.Loader.

    In a subclass, define training_loss(batch) instead of training_step(batch, batch_idx), and let configure_optimizers
    return an optimiser of partnets.optim, followed by one of torch.optim for ψ if the loader has a hyper_batch_size.
    All else is as in Lightning.

    A training step is a step of w_k (Eq. 3) and one of ψ (Eq. 4), as in partnets.Trainer. It logs "loss" and
    "hyper_loss". Optimisation is manual: `clip` clips gradients, and schedulers must be stepped in an override of
    training_step, after super().training_step. global_step and max_steps count the steps of both optimisers.
    Checkpoints include the random states and resume to the same bits. Overrides of the hooks below must call super().

    Several processes train by strategy="ddp_find_unused_parameters_true", each on its part of every batch, as with
    partnets.distributed.Trainer: the loader's batch sizes are those of all processes together. With Lightning's
    ModelParallelStrategy, call partnets.distributed.fully_shard in configure_model.

    ψ that acts only in training learns by looking ahead, so the loader needs the same number of steps_ahead. Unseen
    data are evaluated by training_loss too, with these modules in evaluation mode.

    Attributes:
        audit: whether training starts with partnets.audit.
        clip: as for partnets.step_weights; None does not clip gradients.
        hyper_gradient: how ψ learns, as for partnets.Trainer; None uses the classes' own settings. Set it in __init__.

    Raises:
        ImportError: Lightning is not installed; at import of this module.
        ValueError: the loader or the optimisers are not as above, the model and the chunks differ in C, several
            processes use another strategy or cannot share a batch, gradients are scaled (precision="16-mixed") with
            `clip` or looking ahead, or partnets.audit finds a leak, unless the class has audit = False; when training
            starts.
        RuntimeError: on_train_start was overridden without a call of super(); before the first step.

    Example:
        >>> import partnets, torch
        >>> from partnets import hyper
        >>> class Classifier(PartitionedModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         network = torch.nn.Sequential(hyper.InputMask(4), torch.nn.Linear(4, 2))
        ...         self.network = partnets.partition(network, (0.8, 0.2))
        ...     def training_loss(self, batch):
        ...         x, y = batch
        ...         return torch.nn.functional.cross_entropy(self.network(x), y)
        ...     def configure_optimizers(self):
        ...         psi = torch.optim.Adam(hyper.hyperparameters(self))
        ...         return partnets.optim.Adam(self), psi
        >>> chunks = partnets.chunk((torch.randn(60, 4), torch.randint(2, (60,))), (0.8, 0.2))
        >>> loader = partnets.Loader(chunks, batch_size=16, steps=100, hyper_batch_size=16)
        >>> lightning.Trainer(max_epochs=10).fit(Classifier(), loader)  # doctest: +SKIP
    """

    audit: bool = True
    clip: float | None = None
    hyper_gradient: Choice | None = None

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._checked, self._noise = False, None

    def training_loss(self, batch: Any) -> Tensor:
        """Return the mean negative log-likelihood of a batch's examples in nats, by the active subnetwork."""
        raise NotImplementedError(f"{type(self).__name__} has no training_loss(batch); define it.")

    def training_step(self, draw: Draw, batch_idx: int) -> None:
        """Take a step of w_k, and one of ψ if the draw has a batch for it."""
        if not self._checked:
            raise RuntimeError(
                f"{type(self).on_train_start.__qualname__} skipped the checks of PartitionedModule, including the"
                " audit; let it call super().on_train_start()."
            )
        optimizers = self.optimizers()
        optimizer, hyper_optimizer = (optimizers, None) if draw.hyper_k is None else optimizers
        compute, options, ranks = self.training_loss, {"backward": self._backward}, self.trainer.world_size
        loss = step_weights(self, optimizer, draw.k, draw.batch, compute, clip=self.clip, **options)
        self.log("loss", loss, sync_dist=ranks > 1)
        if hyper_optimizer is None:
            return
        batches = {draw.hyper_k: draw.hyper_batch}
        how = {"clip": self.clip, "averaged": averaged if ranks > 1 else alone, **options}
        loss = self._strategy.step_hyper(self, optimizer, hyper_optimizer, batches, compute, compute, **how)
        self.log("hyper_loss", loss, sync_dist=ranks > 1)

    def _backward(self, loss: Tensor) -> None:
        expect(self.trainer.strategy.model)
        self.manual_backward(loss)

    def setup(self, stage: str) -> None:
        """Keep DistributedDataParallel from sending the buffers of partitions, which are the same on all ranks."""
        if self.trainer.world_size > 1:
            leave_buffers_alone(self)

    def on_fit_start(self) -> None:
        """Raise ValueError for other strategies and for overfit_batches; make the models of DDP's ranks equal."""
        if self.trainer.world_size > 1:
            model = self.trainer.strategy.model
            if any(isinstance(module, FSDPModule) for module in self.modules()):
                for optimizer in self.trainer.optimizers:
                    if isinstance(optimizer, PartitionedOptimizer):
                        optimizer.full_states()  # into which a checkpoint is loaded
            elif isinstance(model, nn.parallel.DistributedDataParallel) and _takes_any_parameters(model):
                check_agreement(partitions(self))
                broadcast_rows(self, self.device)
                pack(model)
            else:
                raise ValueError(
                    f"{self.trainer.world_size} processes train by {type(self.trainer.strategy).__name__}; pass"
                    " strategy='ddp_find_unused_parameters_true', as each step trains other parameters, or"
                    " ModelParallelStrategy, and call partnets.distributed.fully_shard in configure_model."
                )
        if self.trainer.overfit_batches:
            raise ValueError(
                f"overfit_batches={self.trainer.overfit_batches} replaces the loader, which assigns batches to"
                " partitions; leave it 0, and pass a partnets.Loader of chunks of few examples."
            )

    def on_train_start(self) -> None:
        """Check the model, the loader and the optimisers, and restore the random states of a resumed checkpoint."""
        loader = self.trainer.train_dataloader
        self._check(loader, self.trainer.optimizers)
        if self.trainer.world_size > 1:  # each draws its part of each batch
            group = None if self.device_mesh is None else self.device_mesh["data_parallel"].get_group()
            draws = loader.dataset
            check_agreement({"the loader": draws.identity()})
            sizes = {"batch_size": draws.batch_size, "hyper_batch_size": draws.hyper_batch_size or 0}
            draws.chunks = share(loader.chunks, group)
            check_shared(draws.chunks.ranks, draws.accumulate, **sizes)
        check_same_chunks(self, loader.chunks)
        if self.audit:
            batches = loader.chunks, loader.dataset.batch_size
            with self._without_logs():
                # A leak may be visible only in one rank's examples.
                on_all_ranks(lambda: check_leaks(self, *batches, lambda batch: (self._computed(batch),) * 2))
        remember_chunks(self, loader.chunks)
        if self.trainer.ckpt_path is not None and self._noise is not None:
            random_state.set_state(self._noise, self.device)
        self._checked = True

    def estimate_statistics(self) -> None:
        """Call partnets.estimate_statistics on the chunks of the training's Loader."""
        chunks = self.trainer.train_dataloader.chunks
        with self._without_logs():
            estimate_statistics(self, chunks, forward=lambda _, batch: (self._computed(batch), None))

    def _computed(self, batch: Any) -> Tensor:
        """Return training_loss of a batch converted to the trainer's precision."""
        return self.training_loss(self.trainer.precision_plugin.convert_input(batch))

    @contextmanager
    def _without_logs(self) -> Iterator[None]:
        self.log = lambda *_, **__: None  # these passes are not training steps
        try:
            yield
        finally:
            del self.log

    def on_validation_start(self) -> None:
        """Estimate BatchNorm's statistics for the current weights, as on_train_end does."""
        if isinstance(self.trainer.train_dataloader, Loader):
            self.estimate_statistics()

    def on_train_end(self) -> None:
        """Estimate BatchNorm's statistics for the current weights, for partnets.merge."""
        self.estimate_statistics()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the random states of all ranks to the checkpoint."""
        checkpoint["noise"] = gathered(random_state.get_state(self.device))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store this rank's random states in the checkpoint, if any, until training starts."""
        noise, rank = checkpoint.get("noise", ()), own_rank()
        self._noise = noise[rank] if rank < len(noise) else None

    def _check(self, loader: Any, optimizers: list) -> None:
        if not isinstance(loader, Loader):
            raise ValueError(f"the training data are a {type(loader).__name__}; pass a partnets.Loader of your chunks.")
        check_counts(self, loader.chunks)
        if not isinstance(optimizers[0], PartitionedOptimizer):
            raise ValueError(
                f"configure_optimizers gave {type(optimizers[0]).__name__} first, which steps all partitions at once;"
                " return an optimiser of partnets.optim first, then that of the hyperparameters."
            )
        size = loader.hyper_batch_size
        if len(optimizers) != (1 if size is None else 2):
            raise ValueError(
                f"configure_optimizers gave {len(optimizers)} optimisers for hyper_batch_size={size}; return one of"
                " partnets.optim, and a second one if partnets.Loader draws batches for ψ."
            )
        learning = [] if size is None else parameters_of(optimizers[1])
        self._strategy = Strategy.of_parameters(self, learning, self.hyper_gradient if learning else None)
        steps = self._strategy.seen
        if steps != loader.steps_ahead:
            raise ValueError(
                f"ψ looks {steps} steps ahead, but the loader has batches for {loader.steps_ahead}; pass"
                f" partnets.Loader(steps_ahead={steps})."
            )
        # Lightning's plugin unscales within the optimiser's step, and raises if gradients are unscaled already.
        if getattr(self.trainer.precision_plugin, "scaler", None) is not None and (self.clip is not None or steps):
            raise ValueError(
                f"clip={self.clip} and {steps} steps ahead need gradients that the GradScaler of precision='16-mixed'"
                " has not scaled; pass precision='bf16-mixed', or set clip = None and let no ψ look ahead."
            )


def _takes_any_parameters(model: nn.parallel.DistributedDataParallel) -> bool:
    """Return whether each step may train other parameters."""
    return model.find_unused_parameters and not model.static_graph
