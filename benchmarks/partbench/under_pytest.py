"""The suites under pytest-benchmark, for its storage, comparison and histograms.

usage: [PARTBENCH_PRESET=tiny] python -m pytest --pyargs partbench.under_pytest --benchmark-only [--benchmark-autosave]
"""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

import partkernels as pk
from partbench.measuring.peak import Job, by_allocator
from partbench.measuring.timing import Missing, Workload
from partbench.presets import PRESETS
from partbench.suites import SUITES, memory
from partbench.suites.options import Options, default_backends


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # An environment variable, because a conftest.py beside an installed module is loaded too late for a pytest option.
    name = os.environ.get("PARTBENCH_PRESET", "quick")
    if name not in PRESETS:
        raise pytest.UsageError(f"PARTBENCH_PRESET={name} is not a preset; pass one of {', '.join(PRESETS)}.")
    preset = PRESETS[name]
    device = torch.device(preset.device)
    options = Options(preset, device, torch.get_num_threads(), backends=default_backends(device))
    if "workload" in metafunc.fixturenames:
        timed = [suite.batch(options) for suite in SUITES.values() if hasattr(suite, "batch")]
        pairs = [(workload, peer) for batch in timed for workload in batch.workloads for peer in workload.peers]
        metafunc.parametrize(("workload", "peer"), pairs, ids=[f"{_group(w)}, {peer}" for w, peer in pairs])
    if "job" in metafunc.fixturenames:
        schemes = [(scheme, "auto") for scheme in memory.SCHEMES]
        schemes += [("partkernels", name) for name in options.backends]
        jobs = [dataclasses.replace(j, scheme=s, backend=b) for j in memory.jobs(options) for s, b in schemes]
        metafunc.parametrize("job", jobs, ids=[f"{job.model}, {job.scheme}" for job in jobs])


def _group(workload: Workload) -> str:
    return " ".join(map(str, (workload.suite, *workload.case.values())))


def test_speed_step_and_optim(workload, peer, benchmark):
    """Measure seconds a call."""
    benchmark.group = _group(workload)
    try:
        run = workload.peers[peer](workload.setup(0))
    except Missing as error:
        pytest.skip(f"{peer} does not run here: {error}")
    run.check()
    benchmark.extra_info.update(workload.facts)
    benchmark(run.call)


def test_memory(job: Job, benchmark):
    """Measure seconds a training step; its peak by the allocator, in bytes, is among the extra information."""
    benchmark.group = f"memory {job.model} {job.batch}"
    benchmark.extra_info["peak"] = by_allocator(job)
    with pk.use_backend(job.backend):
        benchmark(job.make())
