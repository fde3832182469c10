"""memory: bytes that a model keeps between steps, and its peak in a step, over others and the floor.

Kept bytes are counted, or computed for models that are too large to build: `parameters`, the weights and all else that
is trained; the `map` of each weight's partition; `defaults`, which replace inactive weights, with the places of the
entries that subnetworks exchange; and the optimiser's `state`.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from tqdm import tqdm

from partbench.measuring import peak
from partbench.measuring.peak import Job
from partbench.measuring.timing import Missing
from partbench.peers.layer import Partitioning
from partbench.peers.operators import obstacles as unavailable
from partbench.peers.train_step import TrainStep
from partbench.results import Record
from partbench.suites.options import Options
from partkernels.arguments import bits_for, row_bytes, sizes
from partnets.subnetworks.partitioning import find
from partnets.subnetworks.rules import rule_of

ABOUT = "bytes a weight, and the peak of a training step"
SCHEMES = ("dense", "paper")
MOMENTS = {"adam": 2, "sgd": 1}
KEPT = ("parameters", "map", "defaults", "state")
# The bytes of an entry's place.
PLACE = 4
# Bytes by the names of figures: KEPT, and the peaks "by allocator" and "by process".
Figures = dict[str, float]


def records(options: Options, save: Callable[[list[Record]], None]) -> list[Record]:
    preset, arithmetic = options.preset, [_job(options, name, 1) for name in options.preset.arithmetic]
    how = {"processes": preset.processes, "save": save}
    return measure(jobs(options), options.backends, arithmetic=arithmetic, **how)


def jobs(options: Options) -> list[Job]:
    """Return jobs with the preset's models and batches; schemes and backends are not set."""
    return [_job(options, name, batch) for name, batch in options.preset.memory]


def _job(options: Options, name: str, batch: int) -> Job:
    partitioning, own = options.partitionings[0], {"input": options.input, "classes": options.classes}
    how = {"device": options.device.type, "threads": options.threads, "active": min(2, partitioning.num_partitions)}
    return Job(name, batch=batch, partitioning=partitioning, **own, **how)


def measure(
    jobs: Sequence[Job],
    backends: Sequence[str],
    *,
    arithmetic: Sequence[Job] = (),
    processes: bool = True,
    save: Callable[[list[Record]], None] = lambda records: None,
) -> list[Record]:
    """Return records of bytes, for each job, peer and figure.

    Args:
        jobs: the models and batches to measure; scheme and backend are set here.
        backends: of ours.
        arithmetic: jobs with models that are too large to build, only for KEPT.
        processes: whether to measure processes too, if that is possible: on the CPU, under Linux.
        save: receives the records so far, after each job.
    """
    processes = processes and sys.platform == "linux"
    peers = {scheme: {"scheme": scheme} for scheme in SCHEMES}
    peers |= {f"partkernels {backend}": {"scheme": "partkernels", "backend": backend} for backend in backends}
    of_layers = {"partkernels nested": {"scheme": "nested"}}  # their share is found by runs, not by arithmetic
    found: list[Record] = []
    for job in tqdm(jobs, disable=None, unit="model", leave=False):
        figures: dict[str, Figures] = {}
        for name, peer in (peers | of_layers).items():
            own = dataclasses.replace(job, **peer)
            obstacle = unavailable().get(own.backend)
            try:
                if not obstacle:
                    figures[name] = _measured(own, processes)
            except Missing as error:
                obstacle = str(error)
            except (RuntimeError, ValueError) as error:  # for example, a process that fails
                obstacle = f"failed: {error}"
            if obstacle:
                found.append(Record("memory", case(job, ""), name, "B", missing=obstacle))
        if "dense" in figures:
            # The floor's peaks are the dense model's plus the least that any assignment takes.
            floor = _computed(job, "floor")
            figures["floor"] = {n: value + floor["map"] for n, value in figures["dense"].items()} | floor
        found += recorded(job, figures)
        save(found)
    for job in arithmetic:
        schemes = {name: peer["scheme"] for name, peer in peers.items()} | {"floor": "floor"}
        figures = {name: _computed(job, scheme) for name, scheme in schemes.items()}
        found += recorded(job, figures, how="by arithmetic")
    return found


def _measured(job: Job, processes: bool) -> Figures:
    with job.using():
        figures = counted(job.make())
    figures["peak of a step, by allocator"] = peak.by_allocator(job)
    if processes and job.device == "cpu":
        figures["peak of a step, by process"] = peak.by_process(job)
    return figures


def _computed(job: Job, scheme: str) -> Figures:
    return computed(scheme, _without_memory(job), job.partitioning, job.optimizer or job.found().optimizer)


def _without_memory(job: Job) -> nn.Module:
    with torch.device("meta"):
        return job.found().make()


def recorded(job: Job, figures: dict[str, Figures], **facts: str) -> list[Record]:
    """Return a record for each peer and figure, with the size of the model and of its partitioned part."""
    model = _without_memory(job)
    layers, obstacles = find(model)
    dense = {type(model.get_submodule(path)).__name__ for path in obstacles}
    parameters, weights = sum(p.numel() for p in model.parameters()), sum(w.numel() for w in mapped(layers.values()))
    known = {"name": job.found().name, "parameters": parameters, "weights": weights}
    facts = {**known, "dense layers": ", ".join(sorted(dense)), **facts}
    every = [(peer, figure, value) for peer, values in figures.items() for figure, value in values.items()]
    return [Record("memory", case(job, figure), peer, "B", [[n]], facts=facts) for peer, figure, n in every]


def case(job: Job, figure: str) -> dict[str, str | int]:
    model = job.found()
    about = {"model": model.name, "batch": job.batch, "optimizer": job.optimizer or model.optimizer}
    return {**about, "device": job.device, **job.partitioning.case(), "figure": figure}


def counted(step: TrainStep) -> Figures:
    """Count the bytes of KEPT after a step, without the step counts."""
    kept = step.kept()
    kept["state"] = [t for t in kept["state"] if t.is_floating_point() and t.dim()]
    return {name: sum(t.untyped_storage().nbytes() for t in kept[name]) for name in KEPT}


def computed(scheme: str, model: nn.Module, partitioning: Partitioning, optimizer: str) -> Figures:
    """Compute KEPT of a torch.nn model, on any device, under a scheme: 'dense', 'paper', 'partkernels' or 'floor'.

    The floor is the least that any scheme could keep: log2 of the number of such assignments, which is the entropy
    of the proportions for each weight. (An assignment that is drawn from a seed could be drawn again without memory.)
    """
    found, size = find(model)[0].values(), next(model.parameters()).element_size()
    count, parameters = sum(w.numel() for w in mapped(found)), sum(p.numel() for p in model.parameters()) * size
    map, defaults, state = 0.0, 0.0, MOMENTS[optimizer] * parameters
    if scheme == "partkernels":
        weights, rows = [], 0
        for module in found:
            for name, parameter in module.named_parameters(recurse=False):
                if rule_of(type(module)).is_weight(name, parameter):
                    weights.append(parameter)
                else:  # a row for each partition, beside their sum or product
                    rows += partitioning.num_partitions * parameter.numel() * size
                    state += MOMENTS[optimizer] * (partitioning.num_partitions - 1) * parameter.numel() * size
        parameters += rows
        bits = bits_for(partitioning.num_partitions)
        exchanged = sum(sum(sizes(w.numel(), partitioning.proportions)[1:]) for w in weights)
        map = sum(w.shape[0] * row_bytes(math.prod(w.shape[1:]), bits) for w in weights)
        # A default and a learned value; stored defaults are also in the state_dict.
        defaults = exchanged * (PLACE + size * (3 if partitioning.defaults == "stored" else 2))
    elif scheme == "paper":
        map, defaults = count, count * size
    elif scheme == "floor":
        map = count * entropy(partitioning) / 8
    return dict(zip(KEPT, (parameters, map, defaults, state), strict=True))


def mapped(layers: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the weights of torch.nn layers that every scheme partitions entry by entry with a map."""
    return [layer.weight for layer in layers if isinstance(layer, nn.Linear | nn.Conv2d | nn.Embedding)]


def entropy(partitioning: Partitioning) -> float:
    """Return the bits a weight that any assignment with these proportions needs on average.

    Example:
        >>> entropy(Partitioning((0.5, 0.5)))
        1.0
    """
    return -sum(p * math.log2(p) for p in partitioning.proportions if p)
