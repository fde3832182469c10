"""Checkpoints of a Trainer: all state that determines further steps, as plain values and tensors in one file."""

from __future__ import annotations

import dataclasses
import inspect
import reprlib
import warnings
from collections.abc import Collection, Mapping
from os import PathLike
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from partnets.data.chunks import digest
from partnets.subnetworks.state import state_of
from partnets.training.best_model import Best
from partnets.training.history import History
from partnets.utils import random_state as random_states
from partnets.utils import sealed

STATEFUL = ("model", "optimizer", "hyper_optimizer", "scheduler", "hyper_scheduler")
# The settings that schedulers change in the groups of their optimizer.
SCHEDULED = {"lr", "momentum", "betas"}


def save(
    trainer: Any, path: str | PathLike[str], noises: list[dict[str, Any]], without: Collection[str] = (), **more: str
) -> None:
    """Write a checkpoint for `load`, atomically.

    Args:
        noises: the random_state of each rank's trainer; one if training is not distributed.
        without: entries that are stored elsewhere, from "model", "optimizer" and "best".
        **more: further entries for `read`.
    """
    state = {
        **{name: None if (one := getattr(trainer, name)) is None else one.state_dict() for name in STATEFUL},
        "configuration": trainer.configuration(),
        "order": trainer.chunks.order,
        "examples": digest(trainer.chunks),
        "best": None if trainer.best is None else vars(trainer.best),
        "generator": trainer.generator.get_state(),
        "history": dataclasses.asdict(trainer.history),
        "noises": noises,
    }
    sealed.save({name: value for name, value in state.items() if name not in without} | more, path)


def load(trainer: Any, path: str | PathLike[str], rank: int = 0) -> None:
    """Load a file that `save` wrote, checking it before anything changes; run no code from it.

    Args:
        rank: the rank to restore random states of; they are left unchanged if the file lacks this rank.
    """
    take(trainer, read(trainer, path), path, rank)


def read(trainer: Any, path: str | PathLike[str], without: Collection[str] = ()) -> dict[str, Any]:
    """Return the content of a file that `save` wrote, after checking that it is of this trainer's configuration.

    Args:
        without: as for `save`.
    """
    saved = sealed.load(path, "checkpoint; pass a file that Trainer.save wrote.")
    if missing := sorted({*STATEFUL, "best"} - {*without} - saved.keys()):
        raise ValueError(
            f"{path} has no {', '.join(missing)}, as partnets.distributed.save wrote it; pass its folder to"
            " partnets.distributed.load."
        )
    own = trainer.configuration()
    for name, value in saved["configuration"].items():
        if value != own.get(name):
            raise ValueError(
                f"{path} was saved with {name} {reprlib.repr(value)}, but this trainer has"
                f" {reprlib.repr(own.get(name))}; construct the trainer with the saved settings."
            )
    known = saved["examples"], digest(trainer.chunks)
    if not torch.equal(saved["order"], trainer.chunks.order) or (None not in known and known[0] != known[1]):
        raise_other_chunks(path)
    return saved


def take(trainer: Any, saved: dict[str, Any], path: str | PathLike[str], rank: int = 0) -> None:
    """Set a trainer to the content that `read` returned for the file at `path`; warn if settings differed."""
    before = _settings(trainer)
    for name in STATEFUL:
        if getattr(trainer, name) is not None and name in saved:
            getattr(trainer, name).load_state_dict(saved[name])
    if trainer.best is not None and "best" in saved:
        trainer.best = Best(**saved["best"])
    trainer.generator.set_state(saved["generator"])
    for state in saved["noises"][rank : rank + 1]:
        random_states.set_state(state, trainer.device)
    trainer.history = History(**saved["history"])
    warn_of_others(before, _settings(trainer), path, stacklevel=4)


def random_state(trainer: Any) -> dict[str, Any]:
    """Return the random states with which a trainer continues; while callbacks run, those before them."""
    return trainer.noise or random_states.get_state(trainer.device)


def raise_other_chunks(path: str | PathLike[str]) -> NoReturn:
    """Raise ValueError because a file was saved with other chunks."""
    raise ValueError(
        f"{path} was saved with other chunks: its partitions have seen examples that are in later chunks here."
        " Call partnets.chunk with the same data, in the same order, and the same proportions and seed."
    )


def facts_of(model: nn.Module) -> dict[str, Any]:
    """Return the facts of a model's state that must be the same to load it.

    The nested channels of parameters, by dimension, as their partitions in order and how many are in a row; and the
    dtype and shape of each tensor.
    """
    channels = {}
    for path, module in model.named_modules():
        narrow = getattr(state_of(module), "narrow", None)
        for name, owners in narrow.owners.items() if narrow else ():
            runs = {dim: torch.unique_consecutive(one, return_counts=True) for dim, one in owners.items()}
            channels[f"{path}.{name}".lstrip(".")] = {dim: [one.tolist() for one in run] for dim, run in runs.items()}
    kinds = {
        name: f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        for name, value in model.state_dict().items()
    }
    return {"channels": channels, "parameters": kinds}


def settings_of(
    optimizers: Mapping[str, torch.optim.Optimizer | None], schedulers: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the settings of each group, and of each scheduler, by name.

    Args:
        optimizers: by name.
        schedulers: by name, "scheduler" for the optimizer "optimizer"; only arguments in their state_dict are returned.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> settings_of({"optimizer": optimizer})["optimizer.param_groups[0].lr"]
        0.1
    """
    found, schedulers = {}, schedulers or {}
    for which, optimizer in optimizers.items():
        is_scheduled = schedulers.get(which.replace("optimizer", "scheduler")) is not None
        left_out = {"params", *(SCHEDULED if is_scheduled else ())}
        for i, group in enumerate(optimizer.param_groups if optimizer else ()):
            found |= {f"{which}.param_groups[{i}].{name}": group[name] for name in group if name not in left_out}
    for which, scheduler in schedulers.items():
        if scheduler is not None:
            found |= _settings_of_scheduler(which, scheduler)
    return found


def _settings_of_scheduler(path: str, scheduler: Any) -> dict[str, Any]:
    given = [name for name in inspect.signature(type(scheduler)).parameters if name != "last_epoch"]
    state = scheduler.state_dict()
    found = {f"{path}.{name}": state[name] for name in given if name in state}
    for i, inner in enumerate(state.get("_schedulers", ())):  # of SequentialLR and ChainedScheduler
        own = {name: value for name, value in inner.items() if not name.startswith("_") and name != "last_epoch"}
        found |= {f"{path}.schedulers[{i}].{name}": value for name, value in own.items()}
    return found


def warn_of_others(
    before: Mapping[str, Any], after: Mapping[str, Any], path: str | PathLike[str], stacklevel: int
) -> None:
    """Warn if settings of a checkpoint have replaced different ones."""
    others = [name for name, value in before.items() if str(value) != str(after.get(name))]
    changed = [f"{name} is {after.get(name)}, not {before[name]}" for name in others]
    if changed:
        warnings.warn(
            f"training continues with the settings in {path}: {', '.join(changed)}. To change them, set param_groups,"
            " or the scheduler's attributes, after load.",
            stacklevel=stacklevel + 1,
        )


def _settings(trainer: Any) -> dict[str, Any]:
    optimizers = {"optimizer": trainer.optimizer, "hyper_optimizer": trainer.hyper_optimizer}
    return settings_of(optimizers, {"scheduler": trainer.scheduler, "hyper_scheduler": trainer.hyper_scheduler})
