"""Bar: one target of the kernels, with its measurement in one run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from partbench.measuring.estimates import Estimate


@dataclass(frozen=True)
class Bar:
    """One target, with its measurement in one run.

    Attributes:
        work: the measured work, and its baseline if that is not the dense peer.
        ratio: our figure over the dense peer's; None if a figure is missing, which makes the bar missed.
        most: the upper limit of the ratio.
        faster: the speed-up over torch.where; None if torch.where is not a peer.
        least: the lower limit of `faster`.
        rate: floating-point operations a second; NaN where this does not apply.
        plan: the fastest of several plans; empty if there is only one.
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
