"""draw: a random number that is the same on all ranks, independent of generators' states."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from partkernels.arguments import check_seed
from partkernels.formats.philox import philox4x32, split
from partnets.utils.checks import check_at_least

# "draw" in ASCII; no other use of a seed has this in its counter.
STREAM = 0x64726177


def draw(probabilities: Sequence[float], *, seed: int, step: int) -> int:
    """Draw k ~ Cat(probabilities), 1-based, as a pure function of the arguments, the same on all ranks and restarts.

    Args:
        probabilities: the probabilities of 1, 2, ...: not negative, with any sum above 0, as for torch.multinomial.
        seed: an int in [0, 2**63).
        step: the index of the draw, 0 or more.

    Raises:
        ValueError: the probabilities, seed or step are out of range.

    Example:
        >>> [draw((0.8, 0.1, 0.1), seed=0, step=step) for step in range(12)]
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 3, 1, 1]
    """
    check_seed("seed", seed)
    check_at_least(0, step=step)
    ends = list(itertools.accumulate(probabilities))
    if not ends or min(probabilities) < 0 or not 0 < ends[-1] < float("inf"):
        raise ValueError(f"probabilities={tuple(probabilities)}; pass numbers that are not negative, one above 0.")
    word = philox4x32((*split(step), 0, STREAM), seed)[0]
    return 1 + bisect.bisect(ends, word / 2**32 * ends[-1], hi=len(ends) - 1)
