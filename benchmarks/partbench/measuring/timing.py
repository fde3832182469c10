"""measure: times of each workload's peers, taken side by side; figures of wrong results are refused."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from partbench.measuring.clock import Call, EventClock, WallClock
from partbench.results import Record

# Seconds between saves, which is the most that a killed run can lose.
SAVING = 5.0


class Missing(Exception):
    """The error of a peer that cannot run here; the message says why."""


@dataclass(frozen=True)
class Run:
    """A peer, ready to be timed: its work, and a check that raises AssertionError if the result is wrong."""

    call: Call
    check: Callable[[], None]


@dataclass(frozen=True)
class Workload:
    """Work that several peers can do.

    Attributes:
        suite, case, facts: as in Record.
        setup: returns the peers' shared data for a seed; called again for each pass.
        peers: by name, a function from the data to a Run; it raises Missing if the peer cannot run.
    """

    suite: str
    case: dict[str, str | int | float]
    setup: Callable[[int], object]
    peers: dict[str, Callable[[object], Run]]
    facts: dict[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """The duration of measurements.

    Attributes:
        passes: over all workloads, each with new data. An interval of 95 % confidence takes 6.
        rounds: in a pass, one sample of each peer in random order; fewer if they would take longer than
            `seconds`, but at least 2.
        sample: the least duration of a sample [s].
        seconds: the time limit of the rounds in a pass, for each peer.
        minutes: the time limit of all passes; no pass begins after it, which makes intervals wider.
    """

    passes: int = 6
    rounds: int = 7
    sample: float = 3e-3
    seconds: float = 0.3
    minutes: float = float("inf")


@dataclass(frozen=True, eq=False)
class Batch:
    """Workloads that are timed by one clock with one plan."""

    workloads: Sequence[Workload]
    clock: WallClock | EventClock
    plan: Plan


def measure(batches: Sequence[Batch], *, save: Callable[[list[Record]], None] = lambda records: None) -> list[Record]:
    """Return a record for each workload and peer, in their order.

    A pass goes over all batches, so that the passes of each case are as far apart as possible: a shared machine was
    seen to change its speed by a fifth from minute to minute, which consecutive passes would not show.

    Args:
        batches: the workloads to time.
        save: receives the records so far, after each pass and every few seconds.
    """
    cases = [(batch, workload) for batch in batches for workload in batch.workloads]
    found = [{p: Record(w.suite, w.case, p, facts=w.facts) for p in w.peers} for _, w in cases]
    records = [record for each in found for record in each.values()]
    spent, saved = dict.fromkeys(batches, 0.0), time.monotonic()
    total = sum(batch.plan.passes for batch, _ in cases)
    with tqdm(total=total, disable=None, unit="case", leave=False) as progress:
        for number in range(max((batch.plan.passes for batch in batches), default=0)):
            due = [b for b in batches if number < b.plan.passes and spent[b] <= 60 * b.plan.minutes]
            for (batch, workload), mine in zip(cases, found, strict=True):
                if batch not in due:
                    continue
                progress.set_description(f"pass {number + 1}, {workload.suite}")
                start = time.monotonic()
                _measure_once(workload, mine, batch, number)
                spent[batch] += time.monotonic() - start
                progress.update()
                if time.monotonic() > saved + SAVING:
                    save([record for record in records if record.samples or record.refused or record.missing])
                    saved = time.monotonic()
            save(records)
    return records


def all_measured(workloads: Sequence[Workload], clock: WallClock | EventClock, plan: Plan) -> list[Record]:
    """Return the records of `measure`; raise RuntimeError if a peer has no figure."""
    records = measure([Batch(workloads, clock, plan)])
    for record in records:
        if record.problem:
            raise RuntimeError(f"{record.label}: {record.refused or record.missing}")
    return records


def _measure_once(workload: Workload, records: dict[str, Record], batch: Batch, number: int) -> None:
    """Add one pass over a workload to its peers' records, except those that were refused or failed."""
    clock, plan = batch.clock, batch.plan
    data = workload.setup(number)
    calls = {}
    for peer, record in records.items():
        if record.refused or record.missing:
            continue
        try:
            run = workload.peers[peer](data)
            run.check()
            call = clock.prepare(run.call)
            calls[peer] = call, clock.calls(call)
        except Missing as error:
            record.missing = str(error)
        except AssertionError as error:
            record.refused, record.samples = str(error) or "the result is wrong", []
        except Exception as error:  # one peer's failure must not lose the others' figures
            record.missing, record.samples = f"failed: {type(error).__name__}: {str(error)[:500]}", []
    if not calls:
        return
    order = random.Random(number)
    samples: dict[str, list[float]] = {peer: [] for peer in calls}
    start = time.monotonic()
    for done in range(plan.rounds):
        elapsed = time.monotonic() - start
        if done >= 2 and elapsed * (done + 1) / done > plan.seconds * len(calls):
            break
        turn = order.sample(list(calls), len(calls))
        for peer, duration in zip(turn, clock.round([calls[peer] for peer in turn]), strict=True):
            samples[peer].append(duration)
    for peer, rounds in samples.items():
        records[peer].samples.append(rounds)
