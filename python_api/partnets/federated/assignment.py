"""assign: the chunk of each client (Appendix J.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partkernels.arguments import check_seed, sizes
from partnets.utils.checks import check_at_least


def assign(clients: int, proportions: Sequence[float], seed: int = 0) -> tuple[int, ...]:
    """The chunk of each client, at random, so that chunks have clients in these proportions.

    Chunk D_k is all examples of the clients that have it. Every process that calls this alike gets the same.

    Args:
        clients: how many there are.
        proportions: C numbers that sum to 1; numbers of clients follow by largest remainder.
        seed: an int in [0, 2**63) that decides who has which.

    Returns:
        A chunk, 1..C, for each client.

    Raises:
        ValueError: an argument is out of range, or a chunk would have no client.

    Example:
        >>> assign(10, (0.7, 0.2, 0.1))
        (1, 1, 2, 1, 1, 3, 1, 2, 1, 1)
    """
    check_at_least(1, clients=clients)
    check_seed("seed", seed)
    numbers = sizes(clients, proportions)
    if 0 in numbers:
        raise ValueError(
            f"chunk {numbers.index(0) + 1} of {clients} clients in proportions {tuple(proportions)} would have none,"
            " and its partition would not learn; pass more clients, or proportions that give each chunk one."
        )
    chunks = torch.repeat_interleave(
        torch.arange(1, len(numbers) + 1, device="cpu"), torch.tensor(numbers, device="cpu")
    )
    order = torch.randperm(clients, generator=torch.Generator().manual_seed(seed), device="cpu")
    return tuple(chunks[order].tolist())
