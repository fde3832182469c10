"""decays: each partition's weight decay, from one prior over all weights (Appendix I.1)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

RULES: dict[str, Callable[[int], float]] = {"reciprocal": lambda examples: examples, "square root": math.sqrt}


def decays(precision: float, sizes: Sequence[int], rule: str = "reciprocal") -> tuple[float, ...]:
    """Return C weight decays for partnets.optim, which depend on the number n_k of examples in D_1:k.

    Earlier partitions get larger decays.

    Args:
        precision: lambda of the Gaussian prior N(w; 0, I / lambda), 0 or more.
        sizes: the number of examples of each chunk, as in chunks.sizes.
        rule: 'reciprocal' divides precision by n_k (Appendix I.1), which is exact for a loss that is a mean over n_k
            examples; 'square root' divides by the square root of n_k, as Appendix I.4 does for CIFAR-10.

    Returns:
        C numbers, for the argument weight_decay.

    Raises:
        ValueError: precision is negative or not finite, a size is below 1, or the rule is unknown.

    Example:
        >>> decays(100.0, (800, 100, 100))[2]
        0.1
        >>> decays(1.0, (64, 36), rule="square root")
        (0.125, 0.1)
    """
    if not 0 <= precision < math.inf:
        raise ValueError(f"precision={precision}; pass a finite number that is not negative.")
    if len(sizes) == 0 or not all(size >= 1 for size in sizes):
        raise ValueError(f"sizes={sizes}; pass the number of examples of each chunk, at least 1, as in chunks.sizes.")
    if rule not in RULES:
        raise ValueError(f"rule={rule!r}; pass 'reciprocal' or 'square root'.")
    return tuple(precision / RULES[rule](examples) for examples in itertools.accumulate(sizes))
