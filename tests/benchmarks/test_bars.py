"""Tests of the CPU kernels' targets: the worst subnetwork counts, and a miss is marked."""

from __future__ import annotations

import dataclasses

import pytest
from simulated import BARE, PARTITIONING, timed

from partbench import bars
from partbench.bars import cpu
from partbench.results import Record


def layer(shape: str, active: int, *, ours: float, where: float, work: str = "forward", dtype: str = "float32") -> list:
    """Return records of the peers of a layer's operator; the dense one takes a second."""
    operator = "linear" if "," not in shape else "conv2d"
    case = {"operator": operator, "work": work, "shape": shape, "dtype": dtype, "device": "cpu", **PARTITIONING}
    seconds = {"dense": 1.0, "where": where, cpu.OURS: ours}
    return timed("speed", case | {"active": active}, seconds, flops=3e9)


def only(records: list[Record]) -> bars.Bar:
    (bar,) = cpu.measured(records)
    return bar


def test_a_layer_is_judged_by_the_subnetwork_that_costs_most():
    bar = only(layer("256×64×64", 1, ours=0.5, where=2.0) + layer("256×64×64", 3, ours=0.8, where=2.0))
    assert bar.ratio.value == pytest.approx(0.8)
    assert bar.faster.value == pytest.approx(2.5)
    assert bar.rate == pytest.approx(3e9 / 0.8)
    assert bar.is_met


@pytest.mark.parametrize(
    ("shape", "ours", "where", "is_met"),
    [
        ("256×64×64", 0.96, 4.0, False),  # 0.95 of dense
        ("256×64×64", 0.90, 1.0, False),  # 1.3 times as fast as where
        ("32×64×64", 0.90, 2.0, False),  # 3 times, up to 32 rows
        ("8×64×64", 1.09, 4.0, True),  # 1.10 of dense, up to 8 rows
        ("8×64×64", 1.11, 4.0, False),
    ],
)
def test_bars_depend_on_the_rows(shape, ours, where, is_met):
    assert only(layer(shape, 1, ours=ours, where=where)).is_met == is_met


def test_cases_without_a_bar_have_no_row():
    assert not cpu.measured(layer("8×64×64", 1, ours=9.0, where=1.0, work="grad input"))
    assert not cpu.measured(layer("2×3×8×8, 4×3×3×3", 1, ours=9.0, where=1.0, dtype="bfloat16"))


def test_steps_are_compared_with_dense_steps_of_their_kind_and_the_slowest_subnetwork_counts():
    case = {"model": "MNIST CNN", "batch": 200, "samples": 1, "optimizer": "adam", "device": "cpu", **PARTITIONING}
    records = []
    for active, parameters, hyperparameters in ((1, 1.05, 0.7), (2, 1.0, 0.6)):
        seconds = {
            "dense": 1.0,
            "dense, hyperparameters": 0.5,
            f"{cpu.OURS}, parameters": parameters,
            f"{cpu.OURS}, hyperparameters": hyperparameters,
        }
        if active == 1:
            seconds |= {"dense, iteration": 1.5, f"{cpu.OURS} Trainer, iteration": 1.59}
        records += timed("step", case | {"active": active}, seconds)
    assert {
        bar.work.partition(" over")[0]: (round(bar.ratio.value, 2), bar.is_met) for bar in cpu.measured(records)
    } == {
        "a step of the weights": (1.05, True),
        "a step of the hyperparameters": (1.4, False),
        "an iteration of a Trainer": (1.06, True),
    }


def test_the_table_shows_runs_side_by_side_and_marks_missed_bars():
    runs = [dataclasses.replace(BARE, records=layer("256×64×64", 1, ours=ours, where=4.0)) for ours in (0.5, 1.5)]
    *_, row = bars.table(runs).splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:2] == ["linear forward, float32, 256×64×64", "0.95, 1.3×"]
    assert cells[2].startswith("0.50") and "missed" not in cells[2]
    assert cells[5].startswith("1.50") and cells[5].endswith("**missed**")
