"""What a call costs beyond torch's: every work is measured, and wrong results are refused."""

import pytest

from benchmarks import overhead
from benchmarks.measuring.estimates import Estimate
from benchmarks.measuring.timing import Plan
from benchmarks.results import Record

ONCE = Plan(passes=1, rounds=2, sample=0, seconds=0)


def test_every_work_of_every_layer_has_a_row():
    found = overhead.overheads([overhead.LINEAR, overhead.CONV2D], ONCE)
    rows = overhead.table(found).splitlines()
    assert len(rows) == 2 + 2 * 2 * len(overhead.WORKS)
    assert all(one.dense > 0 and one.ours > 0 for one in found)
    assert rows[2].startswith("| linear 1×64×64 | 2 of 3 | without autograd |")


def test_what_is_beyond_torchs_is_taken_side_by_side():
    dense = Record("overhead", {}, "dense", samples=[[1e-6, 2e-6, 4e-6]])
    ours = Record("overhead", {}, "partkernels", samples=[[2e-6, 5e-6, 6e-6]])
    one = overhead._overhead(overhead.LINEAR, 3, "forward", dense, ours)
    assert one.beyond.value == pytest.approx(2)
    assert (one.dense, one.ours, one.least_dense, one.least_ours) == pytest.approx((2, 5, 1, 2))
    assert overhead.table([one]).endswith("| 1.0 | 2.0 | 1.0 |")
    assert isinstance(one.beyond, Estimate)


def test_a_refused_figure_is_an_error():
    dense, ours = (Record("overhead", {}, peer, samples=[[1.0]]) for peer in overhead.PEERS)
    ours.refused = "the result is wrong"
    with pytest.raises(RuntimeError, match="the result is wrong"):
        overhead._overhead(overhead.LINEAR, 3, "forward", dense, ours)
