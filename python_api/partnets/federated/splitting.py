"""dirichlet: examples of a data set divided among clients that differ in what they see (Appendix J.2)."""

from __future__ import annotations

import math
from bisect import bisect
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partkernels.arguments import check_seed
from partnets.data.splitting import codes
from partnets.utils.checks import check_at_least


def dirichlet(labels: Any, clients: int, alpha: float, seed: int = 0) -> list[Tensor]:
    """Divides examples among clients, each of which has a mixture of labels of its own (Hsu et al. 2019).

    A client's mixture is drawn from Dirichlet(alpha * the shares of the labels in the whole), and its examples by it,
    without replacement: labels that have run out drop out of the mixtures, and who has none left draws a new one.
    Sizes differ by one at most. Labels may be anything that clients shall differ in: classes, or of a rotation the bin,
    torch.bucketize(angles, edges).

    Args:
        labels: of each example: a tensor, an array or a list.
        clients: how many there are; no more than examples.
        alpha: above 0; the smaller, the fewer labels a client sees: at 0.1 most of them one, at 100 all alike.
        seed: an int in [0, 2**63).

    Returns:
        For each client the places of its examples, int64, ascending; each example is in one of them.

    Raises:
        TypeError, ValueError: an argument is out of range, or labels are not one for each example.

    Example:
        >>> parts = dirichlet([0, 1] * 50, clients=4, alpha=0.1)
        >>> [len(part) for part in parts], torch.cat(parts).unique().numel()
        ([25, 25, 25, 25], 100)
    """
    check_at_least(1, clients=clients)
    check_seed("seed", seed)
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha={alpha}; pass a finite number above 0, as 0.1.")
    total = len(labels)
    classes = codes("labels", labels, total)
    if clients > total:
        raise ValueError(f"there are {total} examples for {clients} clients; pass at least one for each.")
    rng = np.random.default_rng(seed)
    order = torch.from_numpy(rng.permutation(total))
    pools = [order[classes[order] == label].tolist() for label in range(int(classes.max()) + 1)]

    def mixture() -> list[float]:
        """Of each label the share that a client is to have of it: 0 of those that have run out."""
        left = [label for label, pool in enumerate(pools) if pool]
        shares = rng.dirichlet([alpha * len(pools[label]) / total for label in left]).tolist()
        found = dict(zip(left, shares, strict=True))
        return [found.get(label, 0.0) for label in range(len(pools))]

    mixtures = [mixture() for _ in range(clients)]
    parts: list[list[int]] = [[] for _ in range(clients)]
    # In turns, so that no client is the last, who would get what nobody else took.
    for turn, drawn in enumerate(rng.random(total).tolist()):
        client = turn % clients
        weights = [share if pool else 0.0 for share, pool in zip(mixtures[client], pools, strict=True)]
        if not any(weights):  # all of its labels have run out
            weights = mixtures[client] = mixture()
        edges = list(accumulate(weights))
        # Up to the first edge that is the sum, where rounding draws the sum itself.
        label = bisect(edges, drawn * edges[-1], hi=edges.index(edges[-1]))
        parts[client].append(pools[label].pop())
    return [torch.tensor(sorted(part), device="cpu") for part in parts]
