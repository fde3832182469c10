"""save and load: checkpoints of a trainer in a folder by torch.distributed.checkpoint, for any number of ranks."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Collection
from os import PathLike
from pathlib import Path

import torch.distributed.checkpoint as dcp

import partnets
from partnets.distributed.collectives import check_same_file, gathered, on_rank_0, own_rank
from partnets.distributed.optimizer_state import OptimizerState
from partnets.evaluation.same_chunks import remember_chunks
from partnets.training import checkpoint
from partnets.training.best_model import Best, copies
from partnets.utils import sealed

# REST has a Trainer's checkpoint without the entries LARGE, which are as large as the model, and their folder's name.
REST = "trainer.pt"
LARGE = ("model", "optimizer", "best")
# The prefix of the folders of LARGE. Each save has its own folder, so files of two saves are never mixed.
PART = "dcp."


def save(trainer: partnets.Trainer, folder: str | PathLike) -> None:
    """Write a checkpoint, each rank its part. All ranks must call it; a process without a group is one rank.

    If the folder has a checkpoint, it is valid until all ranks have written the new one, so there must be space for
    both. The next save deletes the files of a killed one and leaves other files unchanged.

    Args:
        trainer: a Trainer of partnets or partnets.distributed; its model may be sharded by fully_shard.
        folder: a folder that all ranks can write to.

    Raises:
        ValueError: as for Trainer.save, on all ranks.
        torch.distributed.checkpoint.CheckpointException: a rank could not write its part; on all ranks.

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
    folder, noises = Path(folder), gathered(checkpoint.random_state(trainer))
    part, old = PART + gathered(secrets.token_hex(8))[0], _large_files(folder)
    on_rank_0(lambda: _delete({*folder.glob(PART + "*")}.difference(old)))
    dcp.save(_large(trainer), checkpoint_id=folder / part)
    on_rank_0(lambda: checkpoint.save(trainer, folder / REST, noises, without=LARGE, part=part))
    on_rank_0(lambda: _delete(old))


def load(trainer: partnets.Trainer, folder: str | PathLike) -> None:
    """Restore a trainer from a folder that save wrote, on any number of ranks. All ranks must call it.

    torch.distributed.checkpoint unpickles objects other than tensors: load only folders that you trust.

    Raises:
        ValueError: as for Trainer.load.
        FileNotFoundError: no save into this folder was ever finished; on the ranks without the file.
    """
    folder = Path(folder)
    try:
        check_same_file(folder / REST)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{folder} has no {REST}: a save into it was never finished; load another folder, or save again."
        ) from error
    rest = checkpoint.read(trainer, folder / REST, without=LARGE)
    if "part" not in rest:
        raise ValueError(f"{folder / REST} was written by Trainer.save; pass it to the load method of a Trainer.")
    part, large = folder / rest["part"], _large(trainer)
    dcp.FileSystemReader(part).read_metadata()  # dcp.load would hide a missing file behind an error of all ranks
    dcp.load(large, checkpoint_id=part)
    checkpoint.take(trainer, rest, folder, own_rank())
    if trainer.steps:
        remember_chunks(trainer.model, trainer.chunks)
    if trainer.best is not None:
        trainer.best = Best(**large["best"])
        if not trainer.best.step:
            trainer.best.state.clear()


def _large_files(folder: Path) -> list[Path]:
    """Return the folder of LARGE of the checkpoint in a folder, as a list; empty without a checkpoint."""
    try:
        part = sealed.load(folder / REST, "checkpoint").get("part")
    except FileNotFoundError:
        return []
    except (OSError, ValueError):  # REST is damaged: keep all until the new checkpoint is written
        return [*folder.glob(PART + "*")]
    return [one for one in folder.glob(PART + "*") if one.name == part]


def _delete(paths: Collection[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _large(trainer: partnets.Trainer) -> dict:
    large = {"model": trainer.model, "optimizer": OptimizerState(trainer.model, trainer.optimizer)}
    if trainer.best is not None:
        # Copies before the first evaluation too, as load needs tensors to load into.
        large["best"] = vars(trainer.best) | {"state": trainer.best.state or copies(trainer.model)}
    return large
