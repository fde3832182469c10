"""Collective operations of ranks, and checks that all agree; a process without a group is the only rank.

All ranks must call each of these functions.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partnets.subnetworks.state import DEFAULTS, ESTIMATED, LEARNED, MAP, ROWS, STORED, inside, state_of
from partnets.utils.shards import local

# The ends of the names of a weight's buffers that are the same on all ranks, and their contents.
SAME = {MAP: "map", DEFAULTS: "defaults", STORED: "stored defaults"}


def own_rank() -> int:
    """Return the number of this rank, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def gathered(value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, in rank order."""
    if not dist.is_initialized():
        return [value]
    values: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def averaged(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the means of tensors over all ranks, for partnets.step_lookahead.

    Args:
        tensors: this rank's tensors. None, as in missing gradients, counts as 0; the mean is None if all ranks have
            None.
        like: tensors of the same shapes and dtypes, the same on all ranks.
    """
    if not like:
        return []
    given = torch.tensor([one is not None for one in tensors], dtype=torch.int32, device=like[0].device)
    dist.all_reduce(given)
    of_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
    for i, ranks in enumerate(given.tolist()):
        if ranks:
            of_dtype[like[i].dtype].append(i)
    found: list[Tensor | None] = [None] * len(like)
    for chosen in of_dtype.values():
        flat = torch.cat([(torch.zeros_like(like[i]) if tensors[i] is None else tensors[i]).flatten() for i in chosen])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for i, mean in zip(chosen, flat.split([like[i].numel() for i in chosen]), strict=True):
            found[i] = mean.view_as(like[i])
    return found


def on_all_ranks(function: Callable[[], None]) -> None:
    """Call a function on each rank; if it raises on one, raise on all: its error there, and RuntimeError elsewhere."""
    failure = None
    try:
        function()
    except Exception as error:
        failure = error
    messages = gathered(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        if message is not None:
            raise RuntimeError(f"rank {rank} raised {message}")


def on_rank_0(function: Callable[[], None]) -> None:
    """Call a function on rank 0 and wait for it; raise its error on all ranks."""
    failure: list = [None]
    if own_rank() == 0:
        try:
            function()
        except Exception as error:
            failure = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(failure)
    if failure[0] is not None:
        raise failure[0]


def check_same_file(path: str | PathLike[str]) -> None:
    """Raise an error on all ranks unless all of them can read this file with the same content."""
    digest = hashlib.blake2b(digest_size=16)

    def read() -> None:
        with open(path, "rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)

    on_all_ranks(read)
    if len(set(gathered(digest.digest()))) > 1:
        raise ValueError(f"{path} is not the same file on all ranks; let all ranks read the file that was saved last.")


def check_agreement(facts: Mapping[str, object], group: dist.ProcessGroup | None = None) -> None:
    """Raise ValueError on every rank unless these facts are the same, before one rank waits for another forever.

    Args:
        facts: tensors, and plain values that are compared by repr, under names for the error.
        group: the process group of the ranks; all ranks if None.
    """
    everyone = gathered({name: _digest(fact) for name, fact in facts.items()}, group)
    names = dict.fromkeys(name for each in everyone for name in each)
    if different := [name for name in names if len({each.get(name) for each in everyone}) > 1]:
        raise ValueError(
            f"the ranks differ in {', '.join(different)}; construct the same model, chunks and trainer on all ranks,"
            " from the same seeds."
        )


def _digest(fact: object) -> str:
    if not isinstance(fact, Tensor):
        return repr(fact)
    if fact.is_meta:
        return f"{fact.dtype} of shape {tuple(fact.shape)} without values"
    content = fact.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(content.numpy(), digest_size=16).hexdigest()


def check_outside(model: nn.Module) -> None:
    """Raise RuntimeError if a model is inside of partnets.subnetwork, without the weights of other partitions."""
    if inside(model):
        raise RuntimeError("the model is inside of partnets.subnetwork; distribute it before a subnetwork is entered.")


def partitions(model: nn.Module) -> dict[str, object]:
    """Return a model's partition maps and defaults, as facts for check_agreement."""
    states = {path: state_of(module) for path, module in model.named_modules()}
    facts = {
        f"the number of partitions of {path or 'the model'}": one.num_partitions for path, one in states.items() if one
    }
    plans = {path: one.plan for path, one in states.items() if one and one.plan}
    facts |= {
        f"the partitions of {path or 'the model'}": [plan[name] for name in ("proportions", "seed", "scheme")]
        for path, plan in plans.items()
    }
    for name, buffer in own_buffers(model).items():
        for end, what in SAME.items():
            if name.endswith(end):
                facts[f"the {what} of {name.removesuffix(end)}"] = local(buffer)
    return facts


def own_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that partnets.partition has added to a model, by their names."""
    found = {}
    for path, module in model.named_modules():
        if (state := state_of(module)) is not None:
            names = [one + end for one in state.weights for end in SAME]
            names += [one + ROWS for one in (*state.vectors, *state.statistics)]
            for name in (*names, ESTIMATED, LEARNED):
                if (buffer := module._buffers.get(name)) is not None:
                    found[f"{path}.{name}".lstrip(".")] = buffer
    return found
