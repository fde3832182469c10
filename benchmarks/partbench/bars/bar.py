"""Bar: one row of what kernels are held to, in one run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from partbench.measuring.estimates import Estimate


@dataclass(frozen=True)
class Bar:
    """One row, in one run.

    Attributes:
        work: what is done; and beside what, if not the dense peer.
        ratio: ours over the dense peer's; None if what was to be measured has no figure, so that the bar is missed.
        most: what the ratio may be.
        faster: times faster than torch.where; None if that is no peer.
        least: what `faster` must be.
        rate: floating-point operations a second; NaN where they are not the measure.
        plan: which of several was the fastest; empty if there is one.
    """

    work: str
    ratio: Estimate | None
    most: float
    faster: Estimate | None = None
    least: float = math.nan
    rate: float = math.nan
    plan: str = ""

    @property
    def is_met(self) -> bool:
        if self.ratio is None or self.ratio.value > self.most:
            return False
        return self.faster is None or self.faster.value >= self.least
