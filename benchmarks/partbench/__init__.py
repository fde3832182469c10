"""Benchmarks of speed and memory against the alternatives that users have. Run `python -m partbench --help`.

The package measures the importable partkernels and partnets, and needs a checkout only where a module says so.

    peers       layers and their tensors, models, and the implementations that are compared
    suites      speed, step and optim, which are timed, and memory, which counts bytes
    measuring   clocks, alternating peers, checks of results, peaks of memory, the machine, intervals
    presets, cli            the work that each command measures
    results     a file of samples (the module), and committed measurements (the folder)
    figures, summary        estimates from samples, as pandas tables
    compare, report         changes between two files; a page; the tables of docs/benchmarks.md
    bars        targets of the CPU and GPU kernels
    overhead    the cost of calling a small layer, compared with torch: Python and dispatch
    packing     the cost of gathering one partition's entries from a weight, and of scattering them back
    tune        the fastest Triton plan for each layer that speed measures
    gpu         everything that `make gpu` does: steps, a smoke test of every operator, a summary page
    compiled_kernels        the compiled GPU kernels, examined without a GPU
    paper       the paper's experiments
    models      their networks, and transformers
    baselines   the methods that they compare with

A new kernel needs no line here: every available backend is measured in every case and checked against the reference.
A new shape goes into presets, a new peer into peers.operators, training or schemes, a new model into peers.models.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """Raise ImportError that names the extra of partkernels to install if an import in the block fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in ("partbench", "partkernels", "partnets"):
            raise
        raise ImportError(f"{name} is missing; install partkernels' extra {extra!r}: see docs/install.md.") from error


@contextmanager
def quiet(logger: str, level: int) -> Iterator[None]:
    """Set the level of a logger within the block."""
    told = logging.getLogger(logger)
    before = told.level
    told.setLevel(level)
    try:
        yield
    finally:
        told.setLevel(before)
