"""Checks that all ranks agree, made once, before a difference makes one rank wait for another forever."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partnets.subnetworks.state import DEFAULTS, MAP, STORED, inside, state_of
from partnets.training.trainer import Trainer
from partnets.utils.shards import local


def check_agreement(facts: dict[str, object], group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank unless these facts are the same on all of them. All ranks must call it.

    Args:
        facts: tensors, and plain values that are compared by repr, under names for the error.
        group: the process group of the ranks; all ranks if None.

    Raises:
        ValueError: facts differ; the error names them.

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> check_agreement({"the seed": 0})
        >>> dist.destroy_process_group()
    """
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, {name: _digest(fact) for name, fact in facts.items()}, group)
    names = dict.fromkeys(name for each in everyone for name in each)
    if different := [name for name in names if len({each.get(name) for each in everyone}) > 1]:
        raise ValueError(
            f"the ranks differ in {', '.join(different)}; construct the same model, chunks and trainer on all ranks,"
            " from the same seeds."
        )


def check_outside(model: nn.Module) -> None:
    """Raise RuntimeError if a model is inside of partnets.subnetwork, without the weights of other partitions."""
    if inside(model):
        raise RuntimeError("the model is inside of partnets.subnetwork; distribute it before a subnetwork is entered.")


def partitions(model: nn.Module) -> dict[str, object]:
    """Return a model's partition maps and defaults, as facts for check_agreement."""
    facts: dict[str, object] = {}
    for path, module in model.named_modules():
        if (state := state_of(module)) is None:
            continue
        facts[f"the count of {path or 'the model'}"] = state.count
        for name in state.weights:
            weight = f"{path}.{name}".lstrip(".")
            for what, end in (("map", MAP), ("defaults", DEFAULTS), ("stored defaults", STORED)):
                if (buffer := module._buffers.get(name + end)) is not None:
                    facts[f"the {what} of {weight}"] = local(buffer)
    return facts


def settings(trainer: Trainer) -> dict[str, object]:
    """Return the settings of a trainer's optimisers and schedulers by path, as facts for check_agreement.

    Functions and other objects are left out, as ranks cannot compare them.
    """
    states: dict[str, object] = {}
    for name in ("optimizer", "hyper_optimizer"):
        if (optimizer := getattr(trainer, name)) is not None:
            states[f"{name}.param_groups"] = [{**group, "params": None} for group in optimizer.param_groups]
    for name in ("scheduler", "hyper_scheduler"):
        if (scheduler := getattr(trainer, name)) is not None:
            states[name] = scheduler.state_dict()
    found = (leaf for name, state in states.items() for leaf in _leaves(state, name))
    return {at: value for at, value in found if isinstance(value, bool | int | float | str | Tensor | None)}


def _leaves(value: object, at: str) -> Iterator[tuple[str, object]]:
    """Yield the leaves of nested dicts, lists and tuples, each with its path."""
    if not isinstance(value, Mapping | list | tuple):
        yield at, value
        return
    for name, one in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _leaves(one, f"{at}.{name}")


def _digest(fact: object) -> str:
    if not isinstance(fact, Tensor):
        return repr(fact)
    if fact.is_meta:
        return f"{fact.dtype} of shape {tuple(fact.shape)} without values"
    content = fact.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(content.numpy(), digest_size=16).hexdigest()
