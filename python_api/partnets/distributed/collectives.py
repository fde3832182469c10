"""What ranks do together; a process without a group is the only rank."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist


def own_rank() -> int:
    """The number of this rank, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def gathered(value: object) -> list:
    """The values of all ranks, in their order. All ranks must call it.

    Example:
        >>> gathered("alone")
        ['alone']
    """
    if not dist.is_initialized():
        return [value]
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_rank_0(function: Callable[[], None]) -> None:
    """Calls a function on rank 0 and waits for it. All ranks must call it; what it raises, all of them raise.

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
