"""memory: what a model keeps between steps, and its peak in each phase of a step, against others and the floor."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence

import torch
from tqdm import tqdm

from benchmarks import peak
from benchmarks.footprint import Footprint, mapped
from benchmarks.operators import obstacles as unavailable
from benchmarks.peak import Job
from benchmarks.results import Record
from partnets.convert.partitioning import find

FIGURES = tuple(field.name for field in dataclasses.fields(Footprint))
SCHEMES = ("dense", "paper")


def measure(
    jobs: Sequence[Job],
    backends: Sequence[str],
    *,
    arithmetic: Sequence[Job] = (),
    processes: bool = True,
    fused: Sequence[str] = (),
    save: Callable[[list[Record]], None] = lambda records: None,
) -> list[Record]:
    """Records of bytes: for each job, peer and figure.

    A figure is one of Footprint's, counted, or "peak of PHASE, by allocator" or "by process".

    Args:
        jobs: whose models and batches to measure; scheme and backend are set here.
        backends: of ours.
        arithmetic: jobs whose models are too large to make, for Footprint's figures alone.
        processes: whether to measure processes too, where that is possible: on the CPU, under Linux.
        fused: names of models that are measured by Triton's fused plan as well, if that is among the backends.
        save: is given the records that there are, after each job.
    """
    processes = processes and sys.platform == "linux"
    peers = {scheme: {"scheme": scheme} for scheme in SCHEMES}
    peers |= {f"partkernels {backend}": {"scheme": "partkernels", "backend": backend} for backend in backends}
    by_plan = {"partkernels triton fused": {"scheme": "partkernels", "backend": "triton", "plan": "fused"}}
    records = []
    with tqdm(total=len(jobs) + len(arithmetic), disable=None, unit="case", leave=False) as progress:
        for job in jobs:
            facts = _facts(job)
            progress.set_description(f"memory of {facts['name']}")
            progress.update()
            figures: dict[str, dict[str, float]] = {}
            more = by_plan if job.model in fused and "triton" in backends else {}
            for name, peer in (peers | more).items():
                own = dataclasses.replace(job, **peer)
                if own.backend in unavailable():
                    records.append(Record("memory", _case(job, ""), name, "B", missing=unavailable()[own.backend]))
                    continue
                try:
                    figures[name] = _measured(own, processes)
                except RuntimeError as error:
                    records.append(Record("memory", _case(job, ""), name, "B", missing=f"failed: {error}"))
            if "dense" in figures:
                figures["floor"] = _floor(job, figures["dense"])
            records += _records(job, figures, facts)
            save(records)
        for job in arithmetic:
            progress.update()
            figures = {name: _computed(job, peer["scheme"]) for name, peer in peers.items()}
            figures["floor"] = _computed(job, "floor")
            records += _records(job, figures, _facts(job) | {"how": "by arithmetic"})
    return records


def _measured(job: Job, processes: bool) -> dict[str, float]:
    with job.using():
        figures = dataclasses.asdict(Footprint.counted(job.make()))
    figures |= {f"peak of {phase}, by allocator": value for phase, value in peak.by_allocator(job).items()}
    if processes and job.device == "cpu":
        figures |= {f"peak of {phase}, by process": value for phase, value in peak.by_process(job).items()}
    return figures


def _computed(job: Job, scheme: str) -> dict[str, float]:
    found = job.found()
    with torch.device("meta"):
        model = found.make()
    return dataclasses.asdict(Footprint.computed(scheme, model, job.division, job.optimizer or found.optimizer))


def _floor(job: Job, dense: dict[str, float]) -> dict[str, float]:
    """Footprint's floor; for peaks, the dense model's and the least that any assignment takes."""
    floor = _computed(job, "floor")
    return floor | {figure: value + floor["map"] for figure, value in dense.items() if figure not in FIGURES}


def _facts(job: Job) -> dict[str, float | str]:
    """The model's name, its parameters, how many of them are partitioned, and which kinds of layer are not."""
    found = job.found()
    with torch.device("meta"):
        model = found.make()
    layers, _, obstacles = find(model)
    dense = {type(model.get_submodule(path)).__name__ for path in obstacles}
    return {
        "name": found.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights": sum(weight.numel() for weight in mapped(layers.values())),
        "dense layers": ", ".join(sorted(dense)),
    }


def _case(job: Job, figure: str) -> dict[str, str | int]:
    return {
        "model": job.found().name,
        "batch": job.batch,
        "optimizer": job.optimizer or job.found().optimizer,
        "device": job.device,
        **job.division.case(),
        "figure": figure,
    }


def _records(job: Job, figures: dict[str, dict[str, float]], facts: dict[str, float | str]) -> list[Record]:
    return [
        Record("memory", _case(job, figure), peer, "B", [[value]], facts=facts)
        for peer, values in figures.items()
        for figure, value in values.items()
    ]
