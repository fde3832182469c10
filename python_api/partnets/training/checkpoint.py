"""Checkpoints of a Trainer: all state that determines further steps, as plain values and tensors in one file."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Collection
from os import PathLike
from typing import Any, NoReturn

import torch
from torch import nn

from partnets.data.chunks import digest
from partnets.subnetworks.state import num_partitions, state_of
from partnets.training import validation
from partnets.training.best_model import Best
from partnets.training.history import History
from partnets.training.settings import settings_of, warn_of_others
from partnets.training.state import TrainingState
from partnets.utils import random_state as random_states
from partnets.utils import sealed

FORMAT = 4
_EXPECTED = f"checkpoint of format {FORMAT}; pass a file that Trainer.save wrote."
# The entries of all checkpoints besides format and configuration.
_NAMES = (
    *("order", "examples", "model", "optimizer", "hyper_optimizer", "scheduler", "hyper_scheduler", "best"),
    *("generator", "history", "noises"),
)


def save(
    trainer: TrainingState, path: str | PathLike, noises: list[dict], without: Collection[str] = (), **more: str
) -> None:
    """Write a checkpoint for `load`, atomically.

    Args:
        noises: the random_state of each rank's trainer; one if training is not distributed.
        without: entries that are stored elsewhere, from "model", "optimizer" and "best".
        **more: further entries for `read`.
    """
    state = {name: value for name, value in _state(trainer).items() if name not in without}
    sealed.save({"format": FORMAT, "configuration": configuration(trainer), "noises": noises, **state, **more}, path)


def load(trainer: TrainingState, path: str | PathLike, rank: int = 0) -> None:
    """Load a file that `save` wrote, checking it before anything changes; run no code from it.

    Args:
        rank: the rank to restore random states of; they are left unchanged if the file lacks this rank.
    """
    take(trainer, read(trainer, path, rank), path, rank)


def read(trainer: TrainingState, path: str | PathLike, rank: int = 0, without: Collection[str] = ()) -> dict:
    """Return the content of a file that `save` wrote, checked for `take`; change nothing.

    Args:
        without: as for `save`.
    """
    saved = sealed.load(path, _EXPECTED)
    if not _same(saved.get("format"), FORMAT) or not isinstance(saved.get("configuration"), dict):
        raise ValueError(f"{path} is not a {_EXPECTED}")
    own = configuration(trainer)
    for name, value in saved["configuration"].items():
        if not _same(value, own.get(name)):
            raise ValueError(
                f"{path} was saved with {name} {reprlib.repr(value)}, but this trainer has"
                f" {reprlib.repr(own.get(name))}; construct the trainer with the saved settings."
            )
    try:
        if missing := sorted({*_NAMES} - {*without} - saved.keys()):
            raise ValueError(f"it has no {', '.join(missing)}.")
        same_order = torch.equal(saved["order"], trainer.chunks.order)
        validation.check(trainer, saved, rank)
    except Exception as error:  # a damaged file may fail anywhere
        raise ValueError(
            f"{path} is damaged or not of this program, and nothing has changed. {error} Load an earlier file that"
            " Trainer.save wrote."
        ) from error
    known = saved["examples"], digest(trainer.chunks)
    if not same_order or (None not in known and known[0] != known[1]):
        raise_other_chunks(path)
    return saved


def take(trainer: TrainingState, saved: dict, path: str | PathLike, rank: int = 0) -> None:
    """Set a trainer to the content that `read` returned for the file at `path`; warn if settings differed."""
    before = _settings(trainer)
    for name in ("model", "optimizer", "hyper_optimizer", "scheduler", "hyper_scheduler"):
        if getattr(trainer, name) is not None and name in saved:
            getattr(trainer, name).load_state_dict(saved[name])
    if trainer.best is not None and "best" in saved:
        trainer.best = Best(**saved["best"])
    trainer.generator.set_state(saved["generator"])
    for state in saved["noises"][rank : rank + 1]:
        random_states.set_state(state, trainer.device)
    trainer.history = History(**saved["history"])
    warn_of_others(before, _settings(trainer), path, stacklevel=4)


def _settings(trainer: TrainingState) -> dict[str, Any]:
    optimizers = {"optimizer": trainer.optimizer, "hyper_optimizer": trainer.hyper_optimizer}
    return settings_of(optimizers, {"scheduler": trainer.scheduler, "hyper_scheduler": trainer.hyper_scheduler})


def _same(saved, own) -> bool:
    try:
        return bool(saved == own)
    except Exception:  # a damaged file may have tensors instead of plain values
        return False


def raise_other_chunks(path: str | PathLike) -> NoReturn:
    """Raise ValueError because a file was saved with other chunks."""
    raise ValueError(
        f"{path} was saved with other chunks: its partitions have seen examples that are in later chunks here."
        " Call partnets.chunk with the same data, in the same order, and the same proportions and seed."
    )


def _state(trainer: TrainingState) -> dict:
    return {
        "order": trainer.chunks.order,
        "examples": digest(trainer.chunks),
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "hyper_optimizer": _state_dict(trainer.hyper_optimizer),
        "scheduler": _state_dict(trainer.scheduler),
        "hyper_scheduler": _state_dict(trainer.hyper_scheduler),
        "best": None if trainer.best is None else vars(trainer.best),
        "generator": trainer.generator.get_state(),
        "history": dataclasses.asdict(trainer.history),
    }


def random_state(trainer: TrainingState) -> dict:
    """Return the random states with which a trainer continues; while callbacks run, those before them."""
    return trainer.noise or random_states.get_state(trainer.device)


def _state_dict(stateful) -> dict | None:
    return None if stateful is None else stateful.state_dict()


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[list[str]]:
    """Return the names of each group's parameters, as an optimiser's state depends on their order."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [] if optimizer is None else optimizer.param_groups
    return [[names[parameter] for parameter in group["params"]] for group in groups]


def _channels(model: nn.Module) -> dict[str, dict[int, list[list[int]]]]:
    """Return the nested channels of parameters, by dimension: their partitions in order, and how many are in a row."""
    found = {}
    for path, module in model.named_modules():
        narrow = getattr(state_of(module), "narrow", None)
        for name, owners in narrow.owners.items() if narrow else ():
            runs = {dim: torch.unique_consecutive(one, return_counts=True) for dim, one in owners.items()}
            found[f"{path}.{name}".lstrip(".")] = {dim: [one.tolist() for one in run] for dim, run in runs.items()}
    return found


def configuration(trainer: TrainingState) -> dict:
    """Return the settings that must be the same to resume from a checkpoint."""
    return {
        "chunk sizes": trainer.chunks.sizes,
        "partitions": num_partitions(trainer.model),
        "channels": _channels(trainer.model),
        "parameters": validation.kinds(trainer.model.state_dict()),
        "hyper": list(trainer.hyper),
        "optimizer": trainer.optimizer.kind,
        "hyper_optimizer": type(trainer.hyper_optimizer).__name__,
        "optimizer groups": _groups(trainer.model, trainer.optimizer),
        "hyper_optimizer groups": _groups(trainer.model, trainer.hyper_optimizer),
        "scheduler": type(trainer.scheduler).__name__,
        "hyper_scheduler": type(trainer.hyper_scheduler).__name__,
        "batch_size": trainer.batch_size,
        "hyper_batch_size": trainer.hyper_batch_size,
        "sampling": list(trainer.sampling),
        "clip": trainer.clip,
        "hyper_every": trainer.hyper_every,
        "hyper_steps": trainer.hyper_steps,
        "hyper_after": trainer.hyper_after,
        "hyper_chunks": trainer.hyper_chunks,
        "one_pass": trainer.one_pass,
        "hyper_gradient": {path: repr(one) for path, one in trainer.hyper_gradient.items() if one is not None},
        "keep_best": trainer.best is not None,
        **trainer.settings(),
    }
