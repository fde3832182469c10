"""What a call of a small layer costs beyond torch's own: Python and dispatch; the arithmetic is a few microseconds.

python -m benchmarks.overhead
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.measuring.clock import WallClock
from benchmarks.measuring.estimates import Estimate, passes
from benchmarks.measuring.timing import Batch, Plan, Run, Workload, measure
from benchmarks.peers import schemes
from benchmarks.peers.layer import CPU, Layer, Tensors
from benchmarks.peers.layer import THREE as DIVISION
from benchmarks.results import Record

LINEAR = Layer((1, 64), (64, 64))
CONV2D = Layer((1, 16, 8, 8), (16, 16, 3, 3), padding=1)
WORKS = ("without autograd", "forward", "forward and backward")
PEERS = ("dense", "partkernels")
PLAN = Plan(passes=6, rounds=40, sample=2e-3, seconds=1.0)
HEAD = ("layer", "live", "work", "torch", "partnets", "beyond it", "least of torch", "of partnets", "beyond it")


@dataclass(frozen=True)
class Overhead:
    """Of one work of one layer [µs].

    Attributes:
        dense, ours: medians.
        beyond: the median of ours - dense of samples taken side by side, with its interval.
        least_dense, least_ours: the least of all samples, to which what else runs on the machine adds little.
    """

    layer: Layer
    active: int
    work: str
    dense: float
    ours: float
    beyond: Estimate
    least_dense: float
    least_ours: float


def workload(layer: Layer, active: int, work: str) -> Workload:
    """torch's layer and ours with subnetwork and partition `active`; x needs no gradient, as of a first layer."""
    case = {"operator": layer.operator, "shape": layer.shape, "active": active, "work": work}
    peers = {peer: partial(_run, peer, active, work) for peer in PEERS}
    return Workload("overhead", case, partial(Tensors, layer, DIVISION), peers)


def _run(peer: str, active: int, work: str, tensors: Tensors) -> Run:
    module = schemes.under(peer, tensors.module, active, active)
    expected = schemes.under("dense", tensors.module, active, active)(tensors.x)
    return Run(_call(module, tensors, work), lambda: torch.testing.assert_close(module(tensors.x), expected))


def _call(module: nn.Module, tensors: Tensors, work: str) -> Callable[[], object]:
    x, grad, parameters = tensors.x, tensors.grad, list(module.parameters())

    def without_autograd() -> Tensor:
        with torch.no_grad():
            return module(x)

    def forward_and_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(module(x), parameters, grad)

    return dict(zip(WORKS, (without_autograd, partial(module, x), forward_and_backward), strict=True))[work]


def overheads(layers: Sequence[Layer], plan: Plan = PLAN) -> list[Overhead]:
    """For each layer, each work with the second and with all partitions live; the latter draws no defaults."""
    cases = [(layer, active, work) for layer in layers for active in (2, DIVISION.count) for work in WORKS]
    batch = Batch([workload(*case) for case in cases], WallClock(CPU, plan.sample), plan)
    records = iter(measure([batch]))
    return [_overhead(*case, next(records), next(records)) for case in cases]


def _overhead(layer: Layer, active: int, work: str, dense: Record, ours: Record) -> Overhead:
    for record in (dense, ours):
        if record.refused or record.missing:
            raise RuntimeError(f"{record.label}: {record.refused or record.missing}")
    sides = zip(dense.samples, ours.samples, strict=True)
    beyond = [median(b - a for a, b in zip(*rounds, strict=True)) * 1e6 for rounds in sides]
    least = [1e6 * min(map(min, record.samples)) for record in (dense, ours)]
    medians = [1e6 * median(passes(record.samples)) for record in (dense, ours)]
    return Overhead(layer, active, work, *medians, Estimate.of(beyond), *least)


def table(found: Sequence[Overhead]) -> str:
    """Markdown: a row for each; microseconds."""
    rows = [HEAD, ["---"] * len(HEAD), *map(_row, found)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(one: Overhead) -> list[str]:
    return [
        f"{one.layer.operator} {one.layer.shape}",
        f"{one.active} of {DIVISION.count}",
        one.work,
        f"{one.dense:.1f}",
        f"{one.ours:.1f}",
        f"{one.beyond:.1f}",
        f"{one.least_dense:.1f}",
        f"{one.least_ours:.1f}",
        f"{one.least_ours - one.least_dense:.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__.partition("\n")[0])
    parser.add_argument("--passes", type=int, default=PLAN.passes, help="over all cases")
    given = parser.parse_args()
    torch.set_num_threads(1)  # so small a layer wakes no other
    print(table(overheads((LINEAR, CONV2D), Plan(given.passes, PLAN.rounds, PLAN.sample, PLAN.seconds))))


if __name__ == "__main__":
    main()
