"""dirichlet: a split of a data set among clients with different mixtures of labels (Appendix J.2)."""

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
    """Split examples among clients, each with a different mixture of labels (Hsu et al. 2019).

    A client's mixture is drawn from Dirichlet(alpha * the labels' shares in the data set), and its examples are drawn
    by this mixture without replacement. Labels that have run out are removed from the mixtures; a client without
    remaining labels draws a new mixture. Sizes differ by at most one. Labels can be classes or any other property, such
    as bins of rotation angles, torch.bucketize(angles, edges).

    Args:
        labels: a label for each example: a tensor, an array or a list.
        clients: the number of clients, at most that of examples.
        alpha: above 0; the smaller it is, the fewer labels a client sees: mostly one at 0.1, the same mixture for all
            at 100.
        seed: an int in [0, 2**63).

    Returns:
        For each client, the indices of its examples, int64, ascending; each example belongs to one client.

    Raises:
        TypeError, ValueError: an argument is out of range, or there is not one label for each example.

    Example:
        >>> parts = dirichlet([0, 1] * 50, clients=4, alpha=0.1)
        >>> [len(part) for part in parts], torch.cat(parts).unique().numel()
        ([25, 25, 25, 25], 100)
    """
    check_at_least(1, clients=clients)
    check_seed("seed", seed)
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha={alpha}; pass a finite number above 0, such as 0.1.")
    total = len(labels)
    classes = codes("labels", labels, total)
    if clients > total:
        raise ValueError(f"there are {total} examples for {clients} clients; pass at least one example per client.")
    rng = np.random.default_rng(seed)
    order = torch.from_numpy(rng.permutation(total))
    pools = [order[classes[order] == label].tolist() for label in range(int(classes.max()) + 1)]

    def mixture() -> list[float]:
        """Draw a client's share of each label, 0 for labels that have run out."""
        left = [label for label, pool in enumerate(pools) if pool]
        shares = rng.dirichlet([alpha * len(pools[label]) / total for label in left]).tolist()
        found = dict(zip(left, shares, strict=True))
        return [found.get(label, 0.0) for label in range(len(pools))]

    mixtures = [mixture() for _ in range(clients)]
    parts: list[list[int]] = [[] for _ in range(clients)]
    # Clients take turns; a client served last would get only the labels that the others left.
    for turn, drawn in enumerate(rng.random(total).tolist()):
        client = turn % clients
        weights = [share if pool else 0.0 for share, pool in zip(mixtures[client], pools, strict=True)]
        if not any(weights):  # all of its labels have run out
            weights = mixtures[client] = mixture()
        edges = list(accumulate(weights))
        # Search up to the first edge equal to the sum: rounding can draw the sum itself.
        label = bisect(edges, drawn * edges[-1], hi=edges.index(edges[-1]))
        parts[client].append(pools[label].pop())
    return [torch.tensor(sorted(part), device="cpu") for part in parts]
