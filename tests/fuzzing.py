"""Random test cases: functions of a `Draw` with a random seed, which hypothesis draws and reports.

FUZZ_CASES=20000 runs more cases, together with pytest's --hypothesis-seed=1 others.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tiers import is_full
from torch import Tensor

CALLS = int(os.environ.get("FUZZ_CASES") or 0)
# Sizes at the boundaries of tiles, vectors, bytes of the packed map and threads.
BOUNDARIES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 130)


class Draw(random.Random):
    """The random choices of one case."""

    say = staticmethod(hypothesis.note)  # describes the case in the report of a failure

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.generator = torch.Generator().manual_seed(self.getrandbits(63))

    def chance(self, of: float) -> bool:
        return self.random() < of

    def size(self, most: int = 130) -> int:
        """Return a size from 1 to `most`, often a small one or one at a boundary."""
        if self.chance(0.4):
            return self.randint(1, min(most, 6))
        return self.choice([size for size in BOUNDARIES if size <= most])

    def randn(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype)


def number_of(usual: int, *, of_calls: float = 1.0) -> int:
    """Return the number of cases: `usual`, three times as many with FULL=1, or FUZZ_CASES times `of_calls` if set."""
    if CALLS:
        return int(CALLS * of_calls)
    return 3 * usual if is_full() else usual


def run_cases(case: Callable[[Draw], None], count: int, draws: Callable[[int], Draw] = Draw) -> None:
    """Run `count` cases; a failure says which seed repeats its case."""
    limits = settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=not CALLS,
        phases=[Phase.generate],  # a smaller seed is no simpler case
        suppress_health_check=list(HealthCheck),
    )
    limits(given(st.builds(draws, st.integers(0, 2**63)))(lambda draw: case(draw)))()
