"""Random test cases. A case is determined by its name and number, so that one command repeats it.

A test file defines cases as functions of a `Draw`. Environment variables set the number of cases and the seed:

    FUZZ_CASES=20000 FUZZ_SEED=1 python -m pytest tests/partkernels/test_fuzz.py

A failure prints the command that repeats its case. If Python itself crashes, run the test file as a program: it prints
each case before it runs it.

    PYTHONPATH=tests python tests/partkernels/test_fuzz.py conv2d 1 20000
"""

from __future__ import annotations

import faulthandler
import os
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from tiers import is_full
from torch import Tensor

SEED = int(os.environ.get("FUZZ_SEED") or 0)
CALLS = int(os.environ.get("FUZZ_CASES") or 0)
ALONE = os.environ.get("FUZZ_CASE")
ROOT = Path(__file__).parent.parent
# Sizes at the boundaries of tiles, vectors, bytes of the packed map and threads.
BOUNDARIES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 130)

Case = Callable[["Draw"], None]


class Draw(random.Random):
    """The random choices of one case, seeded by its name and number.

    Attributes:
        said: the latest description that the case passed to `say`; `main` prints it immediately.
    """

    is_loud = False

    def __init__(self, name: str, number: str) -> None:
        super().__init__(f"{name} {number}")
        self.generator = torch.Generator().manual_seed(self.getrandbits(63))
        self.said = ""

    def say(self, what: str) -> None:
        self.said = what
        if self.is_loud:
            print(what, flush=True)

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
    """Return the number of cases: `usual`, and three times as many with FULL=1.

    If FUZZ_CASES is set, return FUZZ_CASES times `of_calls` instead.
    """
    if CALLS:
        return int(CALLS * of_calls)
    return 3 * usual if is_full() else usual


def run(case: Case, name: str, number: str, file: str) -> None:
    """Run one case; if it raises, raise AssertionError with the command that repeats it."""
    draw = Draw(name, number)
    try:
        case(draw)
    except Exception as error:
        path = Path(file).resolve().relative_to(ROOT)
        again = f"again: FUZZ_CASE='{name} {number}' python -m pytest {path}"
        raise AssertionError(f"{error!r:.2000}\n{draw.said}\n{again}") from error


def run_cases(case: Case, name: str, count: int, file: str) -> None:
    """Run `count` cases; with FUZZ_CASE, run only that case."""
    for i in range(count) if ALONE is None else []:
        run(case, name, f"{SEED}.{i}", file)
    if ALONE is not None and ALONE.startswith(f"{name} "):
        run(case, *ALONE.split(" "), file)


def main(cases: Mapping[str, Case], file: str) -> None:
    """Run one case (arguments NAME SEED.I) or COUNT cases (NAME SEED COUNT; NAME may be 'all'), then print failures."""
    faulthandler.enable()
    Draw.is_loud = True
    name, number, *count = sys.argv[1:]
    failures = []
    for i in [f"{number}.{i}" for i in range(int(count[0]))] if count else [number]:
        for one in cases if name == "all" else [name]:
            print(one, i, flush=True)
            try:
                run(cases[one], one, i, file)
            except AssertionError as error:
                if not count:
                    raise
                failures.append(error)
    for error in failures:
        print(f"FAILED: {error}")
    sys.exit(bool(failures))
