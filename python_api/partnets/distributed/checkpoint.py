"""save and load: checkpoints of a trainer in a folder by torch.distributed.checkpoint, for any number of ranks."""

from __future__ import annotations

import secrets
import shutil
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn

import partnets
from partnets.distributed.ranks import check_same_file, gathered, on_rank_0, own_rank
from partnets.evaluation.same_chunks import remember_chunks
from partnets.optim import PartitionedOptimizer
from partnets.training import checkpoint
from partnets.training.best_model import Best, copies

# REST has a Trainer's checkpoint without the entries LARGE, which are as large as the model, and their folder's name.
REST = "trainer.pt"
LARGE = ("model", "optimizer", "best")
# The prefix of the folders of LARGE. Each save has its own folder, so files of two saves are never mixed.
PART = "dcp."


class OptimizerState:
    """The state of a partitioned optimiser under its parameters' names, for torch.distributed.checkpoint.

    It corresponds to torch.distributed.checkpoint.state_dict for torch's optimisers: names, unlike indices, do not
    depend on the order of parameters, and moments before the first step are zeros, into which they can be loaded.

    Args:
        model: the optimiser's model.
        optimizer: one of partnets.optim.

    Example:
        >>> import tempfile, torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> def parts():
        ...     model = partnets.partition(nn.Sequential(nn.Linear(4, 3)), (0.5, 0.5))
        ...     return model, partnets.optim.Adam(model)
        >>> model, optimizer = parts()
        >>> with partnets.subnetwork(model, active=1, update=1):
        ...     model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step(update=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = dcp.save({"model": model, "optimizer": OptimizerState(model, optimizer)}, checkpoint_id=folder)
        ...     model, optimizer = parts()
        ...     dcp.load({"model": model, "optimizer": OptimizerState(model, optimizer)}, checkpoint_id=folder)
        >>> optimizer.state[model[0].bias]["step"]
        tensor([1, 0])
        >>> dist.destroy_process_group()
    """

    def __init__(self, model: nn.Module, optimizer: PartitionedOptimizer) -> None:
        self.optimizer = optimizer
        self._names = {parameter: name for name, parameter in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        """Return {'state': {name: {moment: tensor, ...}}, 'groups': [settings, with names under 'params']}."""
        names = [self._names[parameter] for parameter in self.optimizer.parameters()]
        states = self.optimizer.full_states()
        groups = self.optimizer.state_dict()["param_groups"]
        groups = [group | {"params": [names[i] for i in group["params"]]} for group in groups]
        return {"state": {self._names[parameter]: state for parameter, state in states.items()}, "groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`.

        Raises:
            ValueError: as for the optimiser's load_state_dict, or the groups have other parameters than this one's.
        """
        names = [self._names[parameter] for parameter in self.optimizer.parameters()]
        saved = state_dict["groups"]
        if [name for group in saved for name in group["params"]] != names:
            raise ValueError(
                "the saved optimiser's groups have other parameters than this one's; construct it with the same groups."
            )
        numbers = {name: i for i, name in enumerate(names)}
        groups = [group | {"params": [numbers[name] for name in group["params"]]} for group in saved]
        state = {i: state_dict["state"][name] for name, i in numbers.items()}
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def save(trainer: partnets.Trainer, folder: str | PathLike[str]) -> None:
    """Write a checkpoint, each rank its part. All ranks must call it; a process without a group is one rank.

    If the folder has a checkpoint, it is valid until all ranks have written the new one, so there must be space for
    both. A save that finishes deletes the files of earlier and of killed ones and leaves other files unchanged.

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
    part = PART + gathered(secrets.token_hex(8))[0]
    dcp.save(_large(trainer), checkpoint_id=folder / part)

    def finish() -> None:
        checkpoint.save(trainer, folder / REST, noises, without=LARGE, part=part)
        for old in {*folder.glob(PART + "*")} - {folder / part}:
            shutil.rmtree(old, ignore_errors=True)

    on_rank_0(finish)


def load(trainer: partnets.Trainer, folder: str | PathLike[str]) -> None:
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


def _large(trainer: partnets.Trainer) -> dict:
    large = {"model": trainer.model, "optimizer": OptimizerState(trainer.model, trainer.optimizer)}
    if trainer.best is not None:
        # Copies before the first evaluation too, as load needs tensors to load into.
        large["best"] = vars(trainer.best) | {"state": trainer.best.state or copies(trainer.model)}
    return large
