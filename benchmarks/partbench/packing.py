"""Cost of gathering one partition's entries from a weight, and of scattering them back: nanoseconds an entry.

python -m partbench.packing
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor

import partkernels as pk
from partbench.figures import markdown
from partbench.measuring.clock import WallClock
from partbench.measuring.estimates import passes
from partbench.measuring.timing import Plan, Run, Workload, all_measured
from partbench.peers.layer import CPU, THREE
from partbench.results import Record
from partkernels.arguments import sizes

# Weights of 1, 4 and 64 MiB: in a core's cache, just beyond it, and beyond all caches.
SHAPES = ((512, 512), (1024, 1024), (4096, 4096))
WORKS = ("gather", "scatter")
# A copy of the whole weight reads and writes all the memory that the other peers may touch.
PEERS = ("masks", "copy of all", "partkernels")
PLAN = Plan(passes=6, rounds=20, sample=2e-3, seconds=0.5)
HEAD = ("weight", "share", "work", *PEERS)


@dataclass(frozen=True)
class Data:
    """A randomly partitioned weight, and the number, mask and values of one partition."""

    weight: Tensor
    partition: pk.Partition
    number: int
    mask: Tensor
    values: Tensor

    @classmethod
    def drawn(cls, shape: tuple[int, int], number: int, seed: int) -> Data:
        torch.manual_seed(seed)
        weight, partition = torch.randn(shape), pk.Partition.random(shape, THREE.proportions, seed=seed)
        mask = partition.mask(number)
        return cls(weight, partition, number, mask, torch.randn(partition.sizes()[number - 1]))


def workload(shape: tuple[int, int], number: int, work: str) -> Workload:
    share = THREE.proportions[number - 1]
    case = {"weight": "×".join(map(str, shape)), "share": f"{share:.0%}", "work": work}
    peers = {peer: partial(_run, peer, work) for peer in PEERS}
    entries = sizes(math.prod(shape), THREE.proportions)[number - 1]
    return Workload("packing", case, partial(Data.drawn, shape, number), peers, {"entries": entries})


def _run(peer: str, work: str, data: Data) -> Run:
    target = data.weight.clone()
    call = _call(peer, work, data, target)

    def check() -> None:
        found = call()
        if peer != "copy of all" and work == "gather":
            assert torch.equal(found, data.weight[data.mask])
        elif peer != "copy of all":
            assert torch.equal(target, data.weight.masked_scatter(data.mask, data.values))

    return Run(call, check)


def _call(peer: str, work: str, data: Data, target: Tensor) -> Callable[[], object]:
    if peer == "copy of all":
        return partial(target.copy_, data.weight)
    if work == "gather":
        mine = partial(pk.gather_entries, data.weight, data.partition, data.number)
        return mine if peer == "partkernels" else lambda: data.weight[data.mask]
    mine = partial(pk.scatter_entries, target, data.partition, data.number, data.values)
    return mine if peer == "partkernels" else partial(target.masked_scatter_, data.mask, data.values)


def table(records: Sequence[Record]) -> str:
    """Return a Markdown table with a row for each case: nanoseconds an entry of the partition, medians of passes."""
    rows: dict[tuple, list[str]] = {}
    for record in records:
        each = 1e9 * median(passes(record.samples)) / record.facts["entries"]
        rows.setdefault(tuple(record.case.values()), []).append(f"{each:.2f}")
    return markdown(HEAD, [[*case, *cells] for case, cells in rows.items()])


def records(shapes: Sequence[tuple[int, int]], plan: Plan = PLAN) -> list[Record]:
    """Measure gathering and scattering by each peer, for the first and the second partition of each shape."""
    cases = [workload(shape, number, work) for shape in shapes for number in (1, 2) for work in WORKS]
    return all_measured(cases, WallClock(CPU, plan.sample), plan)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m partbench.packing", description=__doc__.partition("\n")[0])
    parser.add_argument("--passes", type=int, default=PLAN.passes, help="over all cases")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(table(records(SHAPES, replace(PLAN, passes=given.passes))))


if __name__ == "__main__":
    main()
