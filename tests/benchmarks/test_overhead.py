"""Tests of the costs of a call's overhead and of packing: every work is measured, and wrong results are refused."""

import dataclasses

import pandas as pd
import pytest
import torch

from partbench import overhead, packing
from partbench.measuring.estimates import Estimate
from partbench.measuring.timing import Plan
from partbench.results import Record

CASE = {"layer": "linear 1×64×64", "active": "3 of 3", "work": "forward"}
ONCE = Plan(passes=1, rounds=2, sample=0, seconds=0)


def test_every_work_of_every_layer_has_a_row():
    found = overhead.overheads([overhead.LINEAR, overhead.CONV2D], ONCE)
    rows = overhead.table(found).splitlines()
    assert len(rows) == 2 + 2 * 2 * len(overhead.WORKS)
    assert (found.dense > 0).all() and (found.ours > 0).all()
    assert rows[2].startswith("| linear 1×64×64 | 2 of 3 | without autograd |")


def test_overhead_is_the_median_difference_of_interleaved_samples():
    dense = Record("overhead", CASE, "dense", samples=[[1e-6, 2e-6, 4e-6]])
    ours = Record("overhead", CASE, "partkernels", samples=[[2e-6, 5e-6, 6e-6]])
    one = overhead.overhead(dense, ours)
    assert isinstance(one["beyond"], Estimate) and one["beyond"].value == pytest.approx(2)
    assert [one[name] for name in ("dense", "ours", "least_dense", "least_ours")] == pytest.approx([2, 5, 1, 2])
    assert overhead.table(pd.DataFrame([one])).endswith("| 1.0 | 2.0 | 1.0 |")


def test_each_work_of_each_partition_has_a_row():
    found = packing.records([(40, 33)], ONCE)
    rows = packing.table(found).splitlines()
    assert len(rows) == 2 + 2 * len(packing.WORKS)
    assert rows[0].startswith("| weight | share | work | masks |") and rows[2].startswith("| 40×33 | 80% | gather |")


@pytest.mark.parametrize("work", packing.WORKS)
def test_wrong_entries_are_refused(work):
    data = packing.Data.drawn((40, 33), 2, seed=0)
    other = dataclasses.replace(data, mask=data.mask.flip(0), values=torch.zeros_like(data.values))
    for peer in packing.PEERS:
        packing._run(peer, work, data).check()
    with pytest.raises(AssertionError):
        packing._run("partkernels", work, other).check()
