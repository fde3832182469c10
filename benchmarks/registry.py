"""The suites, in one place: what each measures for given options. New cases belong into these functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks import measure as timing
from benchmarks import memory, models, optim, speed, step
from benchmarks.clock import EventClock, WallClock
from benchmarks.layer import CPU, THREE, Division, Layer
from benchmarks.measure import Batch
from benchmarks.peak import Job
from benchmarks.presets import Preset
from benchmarks.results import Record
from partkernels.backends.dispatch import READY, backends


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        preset: with whatever the command line changed.
        divisions: how weights are partitioned; models and their memory take the first.
        backends: of ours.
        works: of speed; the preset's if None.
        input, classes: of a model of the user's.
    """

    preset: Preset
    device: torch.device = CPU
    threads: int = 1
    divisions: tuple[Division, ...] = (THREE,)
    backends: tuple[str, ...] = ("reference",)
    works: tuple[str, ...] | None = None
    input: tuple[int, ...] | None = None
    classes: int | None = None

    def model(self, name: str) -> models.Model:
        return models.find(name, self.input, self.classes)


@dataclass(frozen=True)
class Suite:
    """A suite, which has one of the two.

    Attributes:
        about: one line for --help.
        batch: what it times. The batches of several suites are timed together.
        records: what it measures by other means; calls what it is given with the records that there are.
    """

    about: str
    batch: Callable[[Options], Batch] | None = None
    records: Callable[[Options, Callable[[list[Record]], None]], list[Record]] | None = None


def measure(
    names: Sequence[str], options: Options, *, save: Callable[[list[Record]], None] = lambda records: None
) -> list[Record]:
    """The records of the suites of these names; `save` is given what there is from time to time."""
    suites, others = [SUITES[name] for name in names], []
    for suite in suites:
        if suite.records:
            before = list(others)
            others += suite.records(options, lambda records, before=before: save(before + records))
    save(others)
    batches = [suite.batch(options) for suite in suites if suite.batch]
    return others + timing.measure(batches, save=lambda records: save(others + records))


def default_backends(device: torch.device) -> tuple[str, ...]:
    """Our backends that are ready for a device; the reference only if there is no other."""
    own = {"cpu": ("cpu",), "cuda": ("triton", "cuda")}.get(device.type, ())
    return tuple(name for name in own if backends()[name] == READY) or ("reference",)


def kernel_clock(options: Options) -> WallClock | EventClock:
    """For single operators: on a GPU without the host's launches, and with cold caches."""
    if options.device.type == "cuda":
        return EventClock(options.device)
    return WallClock(options.device, options.preset.plan.sample)


def _speed(options: Options) -> Batch:
    preset, device = options.preset, options.device
    linear = linear_layers(preset, preset.dtypes, device)
    forward_only = linear_layers(preset, preset.forward_only, device)
    others = [
        replace(division, defaults=kind)
        for division in options.divisions
        for kind in preset.forward_defaults
        if kind != division.defaults
    ]
    works = options.works or preset.works
    workloads = [
        workload
        for some, divisions, measured in (
            (linear + convolutions(preset, device), options.divisions, works),
            (forward_only, options.divisions, ("forward",)),
            (linear, others, ("forward",)),
        )
        for workload in speed.workloads(
            some, divisions, preset.actives, options.backends, works=measured, compiled=preset.compiled
        )
    ]
    return Batch(workloads, kernel_clock(options), preset.plan)


def linear_layers(preset: Preset, dtypes: Sequence[torch.dtype], device: torch.device) -> list[Layer]:
    return [Layer((m, k), (n, k), dtype=dtype, device=device) for dtype in dtypes for m, n, k in preset.linear]


def convolutions(preset: Preset, device: torch.device) -> list[Layer]:
    return [
        Layer(x, weight, **geometry, dtype=dtype, device=device)
        for dtype in preset.dtypes
        for x, weight, geometry in preset.conv2d
    ]


def _step(options: Options) -> Batch:
    preset, division = options.preset, options.divisions[0]
    trainings = [
        step.Training(options.model(name), batch, samples, division, options.device)
        for name, batch, samples in preset.step
    ]
    if preset.series:
        trainings += step.series(options.device)
    workloads = step.workloads(trainings, options.backends, paper=preset.paper)
    return Batch(workloads, WallClock(options.device, preset.step_plan.sample), preset.step_plan)


def _optim(options: Options) -> Batch:
    of = [optim.Parameters(options.model(name), options.divisions[0], options.device) for name in options.preset.optim]
    plan = options.preset.plan
    return Batch(optim.workloads(of, options.preset.updates), WallClock(options.device, plan.sample), plan)


def memory_jobs(options: Options) -> list[Job]:
    """The models and batches of memory; schemes and backends are not set."""
    return [_job(options, name, batch) for name, batch in options.preset.memory]


def _memory(options: Options, save: Callable[[list[Record]], None]) -> list[Record]:
    arithmetic = [_job(options, name, 1) for name in options.preset.arithmetic]
    how = {"processes": options.preset.processes, "fused": options.preset.fused, "save": save}
    return memory.measure(memory_jobs(options), options.backends, arithmetic=arithmetic, **how)


def _job(options: Options, name: str, batch: int) -> Job:
    return Job(
        name,
        batch=batch,
        division=options.divisions[0],
        active=min(2, options.divisions[0].count),
        input=options.input,
        classes=options.classes,
        device=options.device.type,
        threads=options.threads,
    )


SUITES = {
    "speed": Suite("forward, gradients and training of layers", batch=_speed),
    "memory": Suite("bytes a weight, and the peak of a training step", records=_memory),
    "step": Suite("updates of weights and of hyperparameters beside a dense training step (Table 8)", batch=_step),
    "optim": Suite("optimisers' steps over one partition", batch=_optim),
}
