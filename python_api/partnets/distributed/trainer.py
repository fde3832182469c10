"""Trainer: partnets.Trainer on several ranks that share every batch."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

import partnets
from partnets.data.chunks import Chunks
from partnets.distributed.ddp import DDP
from partnets.distributed.ranks import averaged, check_agreement, check_same_file, gathered, on_all_ranks, on_rank_0
from partnets.distributed.shared_chunks import check_shared, share
from partnets.training import checkpoint
from partnets.training.preflight import check_finite


class Trainer(partnets.Trainer):
    """A partnets.Trainer on each rank; all ranks together train as one process does with the same batches.

    All ranks draw the same k and examples from the trainer's generator, and each computes its part of the batch. The
    state of a run is the same on every rank and for any number of ranks, so one process can resume a checkpoint of two
    ranks. Only the noise that the model draws from torch's generator differs: seed it differently on each rank, such as
    by torch.manual_seed(rank).

    L_ML and callbacks are computed on every rank. Pass callbacks that write files to rank 0 only, but callbacks that
    save checkpoints to all ranks.

    Args:
        model: a model on this rank's device. If it is not sharded by partnets.distributed.fully_shard, its parameters
            and buffers are set to those of rank 0.
        chunks: the same chunks on all ranks.
        options: options of partnets.Trainer, the same on all ranks; batch sizes are those of all ranks together.

    Raises:
        ValueError: the ranks differ in a setting that affects the run, such as a seed, a size or an option of an
            optimiser or scheduler, or they cannot share a batch of this size; and the errors of partnets.Trainer.

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = partnets.partition(nn.Linear(4, 2), (0.8, 0.2))
        >>> chunks = partnets.chunk((torch.randn(60, 4), torch.randint(2, (60,))), (0.8, 0.2))
        >>> Trainer(model, chunks, batch_size=16).fit(20).steps["step"][-1]
        20
        >>> dist.destroy_process_group()
    """

    def __init__(self, model: nn.Module, chunks: Chunks, **options: Any) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ValueError("the model is inside of DistributedDataParallel; pass the wrapped model, without it.")
        super().__init__(model, share(chunks), **options)
        if isinstance(model, FSDPModule) and self.strategy.seen:
            ahead = [path or "the model" for path, one in self.hyper_gradient.items() if one is not None]
            raise ValueError(
                f"{', '.join(ahead)} learns by looking ahead, which needs whole weights on each rank, but the model is"
                " sharded; do not shard it, or set these values by hyper.assign and leave them out of hyper."
            )
        facts = {"the seed": self.settings.seed, "the chunks": chunks.order, "the examples": checkpoint.digest(chunks)}
        facts |= {"lml_every": self.settings.lml_every, "patience": self.settings.patience}
        check_agreement(facts | self.configuration() | _settings(self))
        ranks, parts = self.chunks.ranks, [*self._parts.values(), *self._hyper_parts.values()]
        check_shared(ranks, batch_size=self.settings.batch_size, hyper_batch_size=self.settings.hyper_batch_size)
        if any(examples % ranks for examples in parts):
            raise ValueError(
                f"one_pass divides the batches into {', '.join(map(str, parts))} examples, which {ranks} ranks cannot"
                f" share; pass batch sizes that give multiples of {ranks}."
            )
        if not isinstance(model, FSDPModule):
            self._forward = DDP(model)
        self.shows_progress = dist.get_rank() == 0

    def _start(self) -> None:
        on_all_ranks(super()._start)  # a leak may be visible only in one rank's examples

    def _loss(self, *arguments, **options) -> Tensor:
        loss = super()._loss(*arguments, **options)
        self._own = loss.detach()
        return loss

    def _backward(self, loss: Tensor) -> None:
        own = [self._own, loss.detach()]  # without and with penalties
        means = torch.stack(own).double() / dist.get_world_size()
        reduction = dist.all_reduce(means, async_op=True)  # overlaps with the backward pass
        loss.backward()
        reduction.wait()
        # Raised on all ranks or none, so that no rank waits for another; and before the step, as in one process.
        check_finite(means[1], f"step {self.steps + 1}")
        for value, mean in zip(own, means, strict=True):
            value.copy_(mean)  # in place, so that the steps of w and ψ return the mean over ranks

    _averaged = staticmethod(averaged)

    def save(self, path: str | PathLike[str]) -> None:
        """Save a checkpoint on rank 0, as partnets.Trainer.save does. All ranks must call it.

        Raises:
            ValueError: as for partnets.Trainer.save, or the model is sharded; on all ranks.
        """
        self._check_whole("save")
        noises = gathered(checkpoint.random_state(self))
        on_rank_0(lambda: checkpoint.save(self, path, noises))

    def load(self, path: str | PathLike[str]) -> None:
        """Load a checkpoint on every rank, as partnets.Trainer.load does; all ranks must be able to read the same file.

        Ranks beyond the number of ranks that saved the file keep their random states.

        Raises:
            ValueError, OSError: as for partnets.Trainer.load, or the model is sharded.
        """
        self._check_whole("load")
        check_same_file(path)
        checkpoint.load(self, path, dist.get_rank())

    def _check_whole(self, function: str) -> None:
        if isinstance(self.model, FSDPModule):
            raise ValueError(
                f"no rank has the whole model, which is sharded; use partnets.distributed.{function}(trainer, folder)."
            )


def _settings(trainer: Trainer) -> dict[str, object]:
    """Return settings of optimisers and schedulers, except functions and other objects, which cannot be compared."""
    found = {}
    for name in ("optimizer", "hyper_optimizer"):
        for i, group in enumerate(getattr(getattr(trainer, name), "param_groups", ())):
            found |= {f"{name}.param_groups.{i}.{key}": value for key, value in group.items() if key != "params"}
    for name in ("scheduler", "hyper_scheduler"):
        if (scheduler := getattr(trainer, name)) is not None:
            found |= {f"{name}.{key}": value for key, value in scheduler.state_dict().items()}
    plain = bool | int | float | str | Tensor | None
    return {name: value for name, value in found.items() if all(isinstance(leaf, plain) for leaf in tree_leaves(value))}
