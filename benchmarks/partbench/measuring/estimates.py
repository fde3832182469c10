"""Estimates: medians with intervals that also hold for another run of the suite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

CONFIDENCE = 0.95
# The least gap between intervals, as a share of the wider one, since a shared machine drifts more from run to run than
# from pass to pass. Of 348 ratios in four quick runs of the same code, 11 had disjoint intervals and differed by 5 % or
# more; with this margin, none did, and an increase by a fifth would have been detected in 266 of them.
MARGIN = 0.25
# Smaller changes are not reported, whatever their intervals.
SMALLEST_CHANGE = 0.05


@dataclass(frozen=True)
class Estimate:
    """A median over passes and its confidence interval.

    Samples of one pass share their memory and the machine's state, so they are summarised by one number and only passes
    count as independent. The interval lies between order statistics of those numbers, which needs no assumption about
    their distribution: with 6 passes, from the least to the greatest covers the true median with probability
    1 - 2/2**6 = 97 %.

    Attributes:
        value, low, high: in the unit of the estimated quantity.
        confidence: the probability that the interval contains the true median; 0 after one pass.
    """

    value: float
    low: float
    high: float
    confidence: float

    @classmethod
    def of(cls, passes: Sequence[float]) -> Estimate:
        """Return the estimate from one number for each pass.

        Example:
            >>> Estimate.of([1.0, 1.2, 0.9, 1.1, 1.3, 1.0])
            Estimate(value=1.05, low=0.9, high=1.3, confidence=0.96875)
        """
        ordered = sorted(passes)
        cut = 0
        while 2 * (cut + 1) < len(ordered) and _confidence(len(ordered), cut + 1) >= CONFIDENCE:
            cut += 1
        return cls(median(ordered), ordered[cut], ordered[-1 - cut], _confidence(len(ordered), cut))

    def __add__(self, other: Estimate) -> Estimate:
        """Return the sum, with an interval from the sums of both ends, which is wider than necessary.

        Example:
            >>> Estimate(1.0, 0.9, 1.2, 0.95) + Estimate(0.5, 0.5, 0.5, 0.97)
            Estimate(value=1.5, low=1.4, high=1.7, confidence=0.95)
        """
        ends = (self.value + other.value, self.low + other.low, self.high + other.high)
        return Estimate(*ends, min(self.confidence, other.confidence))

    def __format__(self, spec: str) -> str:
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def _confidence(count: int, cut: int) -> float:
    """Return the probability that the median is between the values left after dropping `cut` of `count` at each end."""
    return max(0.0, 1 - 2 * sum(math.comb(count, i) for i in range(cut + 1)) / 2**count)


def passes(samples: Sequence[Sequence[float]]) -> list[float]:
    """Return the median of each pass."""
    return [median(rounds) for rounds in samples]


def ratios(samples: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> list[float]:
    """Return each pass's median ratio of two peers' samples taken side by side, which cancels common slowdowns.

    Example:
        >>> ratios([[2.0, 4.0, 3.0]], [[1.0, 2.0, 3.0]])
        [2.0]
    """
    return [
        median(mine / theirs for mine, theirs in zip(*rounds, strict=True))
        for rounds in zip(samples, base, strict=True)
    ]


def change(before: Estimate, after: Estimate, smallest: float = SMALLEST_CHANGE) -> float | None:
    """Return the relative change if it is beyond noise: intervals well apart, and not small; otherwise None.

    Example:
        >>> change(Estimate(1.0, 0.9, 1.1, 0.97), Estimate(1.2, 1.17, 1.3, 0.97))
        0.2
        >>> change(Estimate(1.0, 0.9, 1.1, 0.97), Estimate(1.2, 1.12, 1.3, 0.97)) is None
        True
    """
    gap = max(after.low - before.high, before.low - after.high)
    apart = gap > 0 and gap >= MARGIN * max(before.high - before.low, after.high - after.low)
    relative = round(after.value / before.value - 1, 6) if before.value else math.inf
    return relative if apart and abs(relative) >= smallest else None
