"""Collective operations of ranks; a process without a group is the only rank."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from os import PathLike

import torch
import torch.distributed as dist
from torch import Tensor


def own_rank() -> int:
    """Return the number of this rank, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def gathered(value: object) -> list:
    """Return the values of all ranks, in rank order. All ranks must call it.

    Example:
        >>> gathered("alone")
        ['alone']
    """
    if not dist.is_initialized():
        return [value]
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def averaged(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the means of tensors over all ranks, for partnets.step_lookahead. All ranks must call it.

    Args:
        tensors: this rank's tensors. None, as in missing gradients, counts as 0; the mean is None if all ranks have
            None.
        like: tensors of the same shapes and dtypes, the same on all ranks.

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> averaged([None, torch.ones(2)], [torch.zeros(3), torch.zeros(2)])
        [None, tensor([1., 1.])]
        >>> dist.destroy_process_group()
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


def on_rank_0(function: Callable[[], None]) -> None:
    """Call a function on rank 0 and wait for it; all ranks raise its error. All ranks must call it.

    Example:
        >>> on_rank_0(lambda: print("once"))
        once
    """
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


def check_same_file(path: str | PathLike) -> None:
    """Raise on all ranks unless all of them can read this file with the same content. All ranks must call it.

    Raises:
        ValueError, RuntimeError, OSError: a rank has another file, or no file, at this path.

    Example:
        >>> check_same_file("/nowhere")
        Traceback (most recent call last):
        FileNotFoundError: ...
    """
    digest = hashlib.blake2b(digest_size=16)

    def read() -> None:
        with open(path, "rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)

    on_all_ranks(read)
    if len(set(gathered(digest.digest()))) > 1:
        raise ValueError(f"{path} is not the same file on all ranks; let all ranks read the file that was saved last.")


def on_all_ranks(function: Callable[[], None]) -> None:
    """Call a function on each rank and wait for the others; if one raises, all raise. All ranks must call it.

    Raises:
        RuntimeError: on ranks where the function succeeded, with the error of another rank.

    Example:
        >>> on_all_ranks(lambda: print("here"))
        here
    """
    failure = None
    try:
        function()
    except Exception as error:
        failure = error
    told = gathered(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, message in enumerate(told):
        if message is not None:
            raise RuntimeError(f"rank {rank} raised {message}")
