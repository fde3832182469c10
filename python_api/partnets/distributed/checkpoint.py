"""save and load: a trainer's checkpoint in a folder, by torch.distributed.checkpoint, for any number of ranks."""

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

# All of a Trainer's checkpoint but what is as large as the model, and the name of the folder beside it that has this.
REST = "trainer.pt"
LARGE = ("model", "optimizer", "best")
# Each save has a folder of its own: what two of them wrote is never mixed.
PART = "dcp."


def save(trainer: partnets.Trainer, folder: str | PathLike) -> None:
    """Writes a checkpoint, each rank what it holds. All ranks must call it; a process without a group is one rank.

    A folder that is written over is the old checkpoint until all ranks have written the new one, and then the new one:
    it takes the space of both. What a save that was killed has left is deleted by the next one; other files stay.

    Args:
        trainer: of partnets or of partnets.distributed; its model may be sharded by fully_shard.
        folder: where all ranks can write.

    Raises:
        ValueError: as Trainer.save, on all ranks.
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
    """Restore a trainer from a folder that save wrote, on the same or another number of ranks; all of them call it.

    torch.distributed.checkpoint unpickles what is no tensor: load only folders that you trust.

    Raises:
        ValueError: as Trainer.load.
        FileNotFoundError: no save into this folder was ever finished; on the ranks that see it so.
    """
    folder = Path(folder)
    try:
        check_same_file(folder / REST)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{folder} has no {REST}: a save into it was never finished; load another folder, or save once more."
        ) from error
    rest = checkpoint.read(trainer, folder / REST, own_rank(), without=LARGE)
    if "part" not in rest:
        raise ValueError(f"{folder / REST} was written by Trainer.save; pass it to the load method of a Trainer.")
    part, large = folder / rest["part"], _large(trainer)
    dcp.FileSystemReader(part).read_metadata()  # dcp.load hides a missing file behind an error of all ranks
    dcp.load(large, checkpoint_id=part)
    checkpoint.take(trainer, rest, folder, own_rank())
    if trainer.steps:
        remember_chunks(trainer.model, trainer.chunks)
    if trainer.best is not None:
        trainer.best = Best(**large["best"])
        if not trainer.best.step:
            trainer.best.state.clear()


def _large_files(folder: Path) -> list[Path]:
    """What the checkpoint in a folder, if there is one, has beside REST."""
    try:
        part = sealed.load(folder / REST, "checkpoint").get("part")
    except FileNotFoundError:
        return []
    except (OSError, ValueError):  # damaged: until there is a new one, any of them may be wanted
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
        # Before the first evaluation too, so that what is loaded has a place.
        large["best"] = vars(trainer.best) | {"state": trainer.best.state or copies(trainer.model)}
    return large
