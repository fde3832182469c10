"""Helpers of the benchmarks' tests: a simulated clock, and results measured by it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

from partbench.measuring.timing import Batch, Plan, Run, Workload, measure
from partbench.results import Record, Results

PARTITIONING = {"partitions": 3, "proportions": "0.8/0.1/0.1", "bits": 2, "defaults": "uniform"}
BARE = Results(
    command="python -m partbench all",
    commit="0123456789abcdef",
    modified=False,
    date="2026-01-02T03:04:05+00:00",
    machine={"processor": "Some CPU", "cores": 2},
    versions={"torch": "2.13.0"},
    settings={"preset": "full", "device": "cpu", "threads": 1, "passes": 6},
    rooflines={"copy": 1e10, "matmul float32": 1e11},
)


class SimulatedClock:
    """A clock on which a call takes the seconds that it returns, with noise as on a shared machine."""

    def __init__(self, seed: int, noise: float = 0.1) -> None:
        self.random, self.noise = random.Random(seed), noise
        self.rounds: list[list[Callable]] = []

    def prepare(self, call):
        return call

    def calls(self, call) -> int:
        return 1

    def round(self, calls: Sequence) -> list[float]:
        self.rounds.append([call for call, _ in calls])
        mood = self.random.lognormvariate(0, 2 * self.noise)  # slows down all peers of a round
        return [call() * mood * self.random.lognormvariate(0, self.noise) for call, _ in calls]


def workload(suite: str = "speed", case: dict | None = None, **seconds: float) -> Workload:
    """Return a workload with peers that take the given seconds."""
    peers = {peer: lambda _, s=s: Run(lambda: s, lambda: None) for peer, s in seconds.items()}
    return Workload(suite, case or {"work": "waiting"}, lambda seed: seed, peers)


def results(*workloads: Workload, seed: int = 0, plan: Plan | None = None, noise: float = 0.03) -> Results:
    """Return the results of a run on a simulated clock."""
    plan = plan or Plan(rounds=5, seconds=1)
    records = measure([Batch(workloads, SimulatedClock(seed, noise), plan)])
    return dataclasses.replace(BARE, command="python -m partbench speed", records=records)


def timed(suite: str, case: dict, seconds: dict[str, float | None], *, count: int = 6, **facts) -> list[Record]:
    """Return a record of each peer of a case, with the same seconds in each of `count` passes, or refused if None."""
    return [
        Record(suite, case, peer, refused="the result is off by 1.0 from float64")
        if value is None
        else Record(suite, case, peer, samples=[[value] * 3 for _ in range(count)], facts=facts)
        for peer, value in seconds.items()
    ]
