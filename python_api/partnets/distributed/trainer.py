"""Trainer: partnets.Trainer on several ranks, which share every batch."""

from __future__ import annotations

from os import PathLike

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import partnets
from partnets.data.chunks import Chunks
from partnets.distributed.collectives import averaged, check_same_file, gathered, on_all_ranks, on_rank_0
from partnets.distributed.consistency import check_agreement, settings
from partnets.distributed.ddp import DDP
from partnets.distributed.shared_chunks import share
from partnets.training import checkpoint
from partnets.training.start import check_finite


class Trainer(partnets.Trainer):
    """A partnets.Trainer on each rank: together they learn what one process learns with the same batches.

    All ranks draw the same k and the same examples from the trainer's own generator, and each computes its part of the
    batch. So the state of a run is the same on every rank, and on however many: a checkpoint of two ranks goes on in
    one process. Only noise differs, which the model draws from torch's generator: seed it with another number on each
    rank, as torch.manual_seed(rank) does.

    L_ML and callbacks are computed on every rank. Give callbacks that write files to rank 0 only, but those that save
    checkpoints to all.

    Args:
        model: on this rank's device. Sharded by partnets.distributed.fully_shard, or as it is: then its parameters
            and buffers become those of rank 0.
        chunks: the same on all ranks.
        options: of partnets.Trainer, the same on all ranks; batch sizes are those of all ranks together.

    Raises:
        ValueError: the ranks differ in something that decides the run, as a seed, a size or a setting of an optimiser
            or a scheduler, or they cannot share a batch of such a size; and partnets.Trainer's own errors.

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = partnets.partition(nn.Linear(4, 2), (0.8, 0.2))
        >>> chunks = partnets.chunk((torch.randn(60, 4), torch.randint(2, (60,))), (0.8, 0.2))
        >>> Trainer(model, chunks, batch_size=16).fit(20).steps["step"][-1]
        20
        >>> dist.destroy_process_group()
    """

    def __init__(self, model: nn.Module, chunks: Chunks, **options) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ValueError("the model is inside of DistributedDataParallel; pass it as it is: this trainer wraps it.")
        super().__init__(model, share(chunks), **options)
        if isinstance(model, FSDPModule) and self._inner_steps:
            ahead = [path or "the model" for path, one in self.hyper_gradient.items() if one is not None]
            raise ValueError(
                f"{', '.join(ahead)} learns by looking ahead, which takes whole weights on each rank, and the model is"
                " sharded: leave it whole, or set what is tuned by hyper.assign and leave it out of hyper."
            )
        facts = {"the seed": self.seed, "the chunks": chunks.order, "the examples": checkpoint.digest(chunks)}
        facts |= {"lml_every": self.lml_every, "patience": self.patience}
        check_agreement(facts | checkpoint.configuration(self) | settings(self))
        ranks, parts = self.chunks.ranks, [*self._parts.values(), *self._hyper_parts.values()]
        for name in ("batch_size", "hyper_batch_size"):
            if (size := getattr(self, name)) % ranks:
                raise ValueError(f"{name}={size}, which {ranks} ranks cannot share; pass a multiple of {ranks}.")
        if any(examples % ranks for examples in parts):
            raise ValueError(
                f"one_pass divides the batches into {', '.join(map(str, parts))} examples, which {ranks} ranks cannot"
                f" share; pass sizes whose parts are multiples of {ranks}."
            )
        if not isinstance(model, FSDPModule):
            self._forward = DDP(model)
        self.shows_progress = dist.get_rank() == 0

    def _start(self) -> None:
        on_all_ranks(super()._start)  # a leak may show in the examples of one rank alone

    def _loss(self, *arguments, **options) -> Tensor:
        loss = super()._loss(*arguments, **options)
        self._own = loss.detach()
        return loss

    def _backward(self, loss: Tensor) -> None:
        own = [self._own, loss.detach()]  # without penalties, and with them
        means = torch.stack(own).double() / dist.get_world_size()
        reduction = dist.all_reduce(means, async_op=True)  # meanwhile the gradients are computed
        loss.backward()
        reduction.wait()
        # All ranks raise or none, or the others would wait for one; and before the step, as one process does.
        check_finite(means[1], f"step {self.steps + 1}")
        for value, mean in zip(own, means, strict=True):
            value.copy_(mean)  # in place: what steps of w and of ψ return is that of all ranks

    _averaged = staticmethod(averaged)

    def save(self, path: str | PathLike) -> None:
        """As partnets.Trainer.save, by rank 0; all ranks must call it.

        Raises:
            ValueError: as partnets.Trainer.save, and if the model is sharded; on all ranks.
        """
        self._check_whole("save")
        noises = gathered(checkpoint.random_state(self))
        on_rank_0(lambda: checkpoint.save(self, path, noises))

    def load(self, path: str | PathLike) -> None:
        """As partnets.Trainer.load, on every rank: the file must be where all of them can read it, and the same.

        A rank beyond those that saved it keeps the random states that it has.

        Raises:
            ValueError, OSError: as partnets.Trainer.load, and if the model is sharded.
        """
        self._check_whole("load")
        check_same_file(path)
        checkpoint.load(self, path, dist.get_rank())

    def _check_whole(self, function: str) -> None:
        if isinstance(self.model, FSDPModule):
            raise ValueError(
                f"no rank has the whole model, which is sharded; use partnets.distributed.{function}(trainer, folder)."
            )
