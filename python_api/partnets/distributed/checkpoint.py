"""save and load: a trainer's checkpoint in a folder, by torch.distributed.checkpoint, for any number of ranks."""

from __future__ import annotations

from collections.abc import Collection
from os import PathLike
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import nn

import partnets
from partnets.distributed.collectives import check_same_file, gathered, on_rank_0, own_rank
from partnets.distributed.optimizer_state import OptimizerState
from partnets.evaluation.same_chunks import remember_chunks
from partnets.nn.partitioned import partitioned_layers
from partnets.training import checkpoint
from partnets.training.best_model import Best, copies

# All of a Trainer's checkpoint but what is as large as the model.
REST = "trainer.pt"
LARGE = ("model", "optimizer", "best")


def save(trainer: partnets.Trainer, folder: str | PathLike) -> None:
    """Writes a checkpoint, each rank what it holds. All ranks must call it; a process without a group is one rank.

    A folder that is written over is for a while neither the old checkpoint nor the new one, other than the file of
    Trainer.save: give each checkpoint a folder of its own.

    Args:
        trainer: of partnets or of partnets.distributed; its model may be sharded by fully_shard.
        folder: where all ranks can write.

    Raises:
        ValueError: as Trainer.save, on all ranks.

    Example:
        >>> import tempfile, torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> chunks = partnets.chunk((torch.randn(60, 4), torch.randint(2, (60,))), (0.8, 0.2))
        >>> def make():
        ...     return partnets.Trainer(partnets.partition(torch.nn.Linear(4, 2), (0.8, 0.2)), chunks, batch_size=16)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trainer = make()
        ...     _ = trainer.fit(10)
        ...     save(trainer, folder)
        ...     resumed = make()
        ...     load(resumed, folder)
        >>> resumed.steps, torch.equal(resumed.model.weight, trainer.model.weight)
        (10, True)
        >>> dist.destroy_process_group()
    """
    noises = gathered(checkpoint.random_state(trainer))
    dcp.save(_large(trainer), checkpoint_id=folder)
    on_rank_0(lambda: checkpoint.save(trainer, Path(folder) / REST, noises, without=LARGE))


def load(trainer: partnets.Trainer, folder: str | PathLike) -> None:
    """Sets a trainer to what save wrote, on as many ranks or others. All ranks must call it.

    torch.distributed.checkpoint unpickles what is no tensor: load only folders that you trust.

    Raises:
        ValueError: as Trainer.load.
    """
    check_same_file(Path(folder) / REST)
    rest = checkpoint.read(trainer, Path(folder) / REST, own_rank(), without=LARGE)
    large = _large(trainer)
    there = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.keys()
    if "best.division" not in there:  # of an earlier version
        large.get("best", {}).pop("division", None)
    dcp.load(large | {"model": _ModelState(trainer.model, there)}, checkpoint_id=folder)
    checkpoint.take(trainer, rest, own_rank())
    if trainer.steps:
        remember_chunks(trainer.model, trainer.chunks)
    if trainer.best is not None:
        trainer.best = Best(**large["best"])
        if not trainer.best.step:
            trainer.best.state.clear()


class _ModelState:
    """A model without places for what its layers note, and a folder of before version 0.3 may lack.

    Args:
        there: what the folder has, by dotted names.
    """

    def __init__(self, model: nn.Module, there: Collection[str]) -> None:
        self.model, self.there = model, there

    def state_dict(self) -> dict:
        notes = {
            f"{path}.{note}".lstrip(".")
            for path, layer in partitioned_layers(self.model)
            for note in getattr(layer, "notes", ())
        }
        state = self.model.state_dict()
        return {name: value for name, value in state.items() if name not in notes or f"model.{name}" in self.there}

    def load_state_dict(self, state_dict: dict) -> None:
        self.model.load_state_dict(state_dict)


def _large(trainer: partnets.Trainer) -> dict:
    large = {"model": trainer.model, "optimizer": OptimizerState(trainer.model, trainer.optimizer)}
    if trainer.best is not None:
        # Before the first evaluation too, so that what is loaded has a place.
        large["best"] = vars(trainer.best) | {"state": trainer.best.state or copies(trainer.model)}
    return large
