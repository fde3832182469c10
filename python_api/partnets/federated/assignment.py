"""assign: a random assignment of clients to chunks (Appendix J.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partkernels.arguments import check_seed, sizes
from partnets.utils.checks import check_at_least


def assign(clients: int, proportions: Sequence[float], seed: int = 0) -> tuple[int, ...]:
    """Assign each client a chunk at random, so that the numbers of clients have these proportions.

    Chunk D_k consists of all examples of its clients. The same arguments give the same result in every process.

    Args:
        clients: the number of clients.
        proportions: C numbers that sum to 1, rounded to numbers of clients by largest remainder.
        seed: an int in [0, 2**63).

    Returns:
        The chunk of each client, an int from 1 to C.

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
            f"chunk {numbers.index(0) + 1} of {clients} clients in proportions {tuple(proportions)} would have no"
            " client, and its partition would not learn; pass more clients, or larger proportions."
        )
    chunks = [k for k, number in enumerate(numbers, start=1) for _ in range(number)]
    order = torch.randperm(clients, generator=torch.Generator().manual_seed(seed), device="cpu")
    return tuple(chunks[i] for i in order.tolist())
