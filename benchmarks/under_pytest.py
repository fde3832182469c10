"""The same suites under pytest-benchmark, so that its storage, comparison and histograms work.

usage: python -m pytest benchmarks/under_pytest.py --benchmark-only [--preset tiny] [--benchmark-autosave]
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

import partkernels as pk
from benchmarks.measure import Missing, Workload
from benchmarks.memory import SCHEMES
from benchmarks.peak import Job, by_allocator
from benchmarks.presets import PRESETS
from benchmarks.registry import SUITES, Options, default_backends, memory_jobs


def options(config: pytest.Config) -> Options:
    preset = PRESETS[config.getoption("--preset")]
    device = torch.device(preset.device)
    return Options(preset, device, torch.get_num_threads(), backends=default_backends(device))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = options(metafunc.config)
    if "workload" in metafunc.fixturenames:
        workloads = [w for suite in SUITES.values() if suite.batch for w in suite.batch(chosen).workloads]
        pairs = [pytest.param(w, peer, id=f"{_group(w)}, {peer}") for w in workloads for peer in w.peers]
        metafunc.parametrize(("workload", "peer"), pairs)
    if "job" in metafunc.fixturenames:
        schemes = [(scheme, "auto") for scheme in SCHEMES] + [("partkernels", name) for name in chosen.backends]
        jobs = [
            dataclasses.replace(job, scheme=scheme, backend=backend)
            for job in memory_jobs(chosen)
            for scheme, backend in schemes
        ]
        metafunc.parametrize("job", [pytest.param(job, id=f"{job.model}, {job.scheme}") for job in jobs])


def _group(workload: Workload) -> str:
    return " ".join(map(str, (workload.suite, *workload.case.values())))


def test_speed_step_and_optim(workload, peer, benchmark):
    """Seconds a call."""
    benchmark.group = _group(workload)
    try:
        run = workload.peers[peer](workload.setup(0))
    except Missing as error:
        pytest.skip(f"{peer} does not run here: {error}")
    run.check()
    benchmark.extra_info.update(workload.facts)
    benchmark(run.call)


def test_memory(job: Job, benchmark):
    """Seconds a training step; its peaks by the allocator, in bytes, are among the extra information."""
    benchmark.group = f"memory {job.model} {job.batch}"
    benchmark.extra_info.update(by_allocator(job))
    with pk.use_backend(job.backend):
        benchmark(job.make())
