"""Tests of the cost of packing: each peer does the same work, and a wrong result has no figure."""

import dataclasses

import pytest
import torch

from partbench import packing
from partbench.measuring.timing import Plan


def test_each_work_of_each_partition_has_a_row():
    found = packing.records([(40, 33)], Plan(passes=1, rounds=2, sample=0, seconds=0))
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
