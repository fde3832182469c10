"""The benchmark suite: speed and memory against what a user would pick instead. Run `python -m partbench --help`.

It measures the partkernels and partnets that Python imports, and needs no checkout but where a module says so.

    peers       what is measured, and against what: a layer and its tensors, models, and the ways to write them
    suites      speed, step and optim, which are timed, and memory, which counts bytes
    measuring   clocks, peers that take turns, wrong results refused, peaks of memory, the machine, intervals
    presets, cli            what is measured by which command
    results     a file of samples (the module), and what was measured with it (the folder)
    figures, summary        what samples say, as pandas' tables
    compare, report         two files side by side; a page; the tables of docs/benchmarks.md
    bars        what the kernels for CPUs and for GPUs are held to
    overhead    what a call of a small layer costs beyond torch's own: Python and dispatch
    packing     what it costs to take one partition's entries out of a weight, and to put them back
    tune        which of Triton's plans is the fastest for the layers that speed measures
    gpu         what `make gpu` does: steps, a smoke of every operator, a page on all
    compiled_kernels        the kernels for GPUs as they are compiled, without one
    paper       the paper's experiments

A new kernel needs no line here: as a backend that is ready, it is measured in every case and checked against the
reference. A new shape goes into presets, a new peer into peers.operators, training or schemes, a new model into
peers.models.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """Says of a library that is missing inside which of partkernels' extras brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in ("partbench", "partkernels", "partnets"):
            raise
        raise ImportError(f"{name} is missing; install partkernels' extra {extra!r}: see docs/install.md.") from error


@contextmanager
def quiet(logger: str, level: int) -> Iterator[None]:
    """Hears of that logger only what is at `level` or above, in here."""
    told = logging.getLogger(logger)
    before = told.level
    told.setLevel(level)
    try:
        yield
    finally:
        told.setLevel(before)
