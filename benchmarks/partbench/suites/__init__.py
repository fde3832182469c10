"""The suites: cases and peers of speed, step and optim, which are timed, and of memory, which counts bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from partbench.measuring import timing
from partbench.results import Record
from partbench.suites import memory, optim, speed, step
from partbench.suites.options import Options

# The suites' modules. A suite has batch(options) if it is timed, or records(options, save) if it measures otherwise.
SUITES = {"speed": speed, "memory": memory, "step": step, "optim": optim}


def measure(
    names: Sequence[str], options: Options, *, save: Callable[[list[Record]], None] = lambda records: None
) -> list[Record]:
    """Return the records of the named suites; `save` receives the records so far from time to time."""
    suites, others = [SUITES[name] for name in names], []
    for suite in suites:
        if hasattr(suite, "records"):
            before = list(others)
            others += suite.records(options, lambda records, before=before: save(before + records))
    save(others)
    # Timed together, so that the passes of each case are far apart.
    batches = [suite.batch(options) for suite in suites if hasattr(suite, "batch")]
    return others + timing.measure(batches, save=lambda records: save(others + records))
