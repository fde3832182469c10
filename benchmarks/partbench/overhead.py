"""Overhead of a small layer in a subnetwork, over torch's layer: Python and dispatch; the arithmetic takes a few µs.

python -m partbench.overhead
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from statistics import median

import pandas as pd
import torch
from torch import Tensor, nn

from partbench.figures import markdown
from partbench.measuring.clock import WallClock
from partbench.measuring.estimates import Estimate, passes
from partbench.measuring.timing import Plan, Run, Workload, all_measured
from partbench.peers import schemes
from partbench.peers.layer import CPU, THREE, Layer, Tensors
from partbench.results import Record

LINEAR = Layer((1, 64), (64, 64))
CONV2D = Layer((1, 16, 8, 8), (16, 16, 3, 3), padding=1)
WORKS = ("without autograd", "forward", "forward and backward")
PEERS = ("dense", "partkernels")
PLAN = Plan(passes=6, rounds=40, sample=2e-3, seconds=1.0)
HEAD = ("layer", "active", "work", "torch", "partnets", "beyond it", "least of torch", "of partnets", "beyond it")


def workload(layer: Layer, active: int, work: str) -> Workload:
    """Return the workload of torch's layer and ours, with update=active; x needs no gradient, as in a first layer."""
    case = {"layer": f"{layer.operator} {layer.shape}", "active": f"{active} of {THREE.num_partitions}", "work": work}
    peers = {peer: partial(_run, peer, active, work) for peer in PEERS}
    return Workload("overhead", case, partial(Tensors, layer, THREE), peers)


def _run(peer: str, active: int, work: str, tensors: Tensors) -> Run:
    module = schemes.under(peer, tensors.module, active, active)
    expected = schemes.under("dense", tensors.module, active, active)(tensors.x)
    inside = partial(schemes.inside, peer, module, active, active)
    forward = _call(module, inside, tensors, "forward")
    return Run(_call(module, inside, tensors, work), lambda: torch.testing.assert_close(forward(), expected))


def _call(
    module: nn.Module, inside: Callable[[], AbstractContextManager], tensors: Tensors, work: str
) -> Callable[[], object]:
    x, grad, parameters = tensors.x, tensors.grad, list(module.parameters())

    def without_autograd() -> Tensor:
        with torch.no_grad(), inside():
            return module(x)

    def forward() -> Tensor:
        with inside():
            return module(x)

    def forward_and_backward() -> tuple[Tensor, ...]:
        with inside():
            return torch.autograd.grad(module(x), parameters, grad)

    return dict(zip(WORKS, (without_autograd, forward, forward_and_backward), strict=True))[work]


def overheads(layers: Sequence[Layer], plan: Plan = PLAN) -> pd.DataFrame:
    """Measure each work of each layer with the second and with all partitions active; the latter draws no defaults.

    Columns: `layer`, `active`, `work`; in microseconds, the medians `dense` and `ours`; `beyond`, an Estimate of the
    median of ours - dense, from samples taken side by side; `least_dense` and `least_ours`, the minima, to which other
    processes add little.
    """
    cases = [
        workload(layer, active, work) for layer in layers for active in (2, THREE.num_partitions) for work in WORKS
    ]
    records = iter(all_measured(cases, WallClock(CPU, plan.sample), plan))
    return pd.DataFrame([overhead(dense, ours) for dense, ours in zip(records, records, strict=True)])


def overhead(dense: Record, ours: Record) -> dict:
    """Return a row of overheads."""
    sides = zip(dense.samples, ours.samples, strict=True)
    beyond = Estimate.of([1e6 * median(b - a for a, b in zip(*rounds, strict=True)) for rounds in sides])
    row = {**ours.case, "beyond": beyond}
    for name, record in (("dense", dense), ("ours", ours)):
        row |= {name: 1e6 * median(passes(record.samples)), f"least_{name}": 1e6 * min(map(min, record.samples))}
    return row


def table(found: pd.DataFrame) -> str:
    """Return a Markdown table of overheads in microseconds."""
    found = found.assign(least=found.least_ours - found.least_dense)
    shown = ["dense", "ours", "beyond", "least_dense", "least_ours", "least"]
    rows = [[row.layer, row.active, row.work, *(f"{row[name]:.1f}" for name in shown)] for _, row in found.iterrows()]
    return markdown(HEAD, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m partbench.overhead", description=__doc__.partition("\n")[0])
    parser.add_argument("--passes", type=int, default=PLAN.passes, help="over all cases")
    given = parser.parse_args()
    torch.set_num_threads(1)  # so small a layer uses no other thread
    print(table(overheads((LINEAR, CONV2D), replace(PLAN, passes=given.passes))))


if __name__ == "__main__":
    main()
