"""Tests of the table of the GPU kernels' targets, on invented results."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from simulated import BARE, PARTITIONING, timed

from partbench import bars
from partbench.bars import gpu
from partbench.presets import PRESETS
from partbench.results import Record, Results
from partbench.suites import SUITES
from partbench.suites.options import Options

AUTOMATIC, FUSED, REBUILD = gpu.BEST
# Bytes a second, and operations a second.
COPY, MATMUL = 4e12, 8e14


def run(records: list[Record]) -> Results:
    return dataclasses.replace(
        BARE,
        machine={"gpu": "NVIDIA H200", "processor": "a processor"},
        settings={"preset": "gpu", "device": "cuda", "threads": 8},
        rooflines={"copy": COPY, "matmul bfloat16": MATMUL},
        records=records,
    )


def layer(shape: str, active: int = 1, *, work: str = "forward", defaults: str = "uniform", **seconds) -> list[Record]:
    """Return records of a case; the dense peer takes a second, and a peer with None is refused."""
    case = {"operator": "conv2d" if "," in shape else "linear", "work": work, "shape": shape, "dtype": "bfloat16"}
    case |= {"device": "cuda", **PARTITIONING, "defaults": defaults, "active": active}
    names = {"automatic": AUTOMATIC, "fused": FUSED, "rebuild": REBUILD, "where": "where"}
    peers = {"dense": 1.0} | {names[name]: value for name, value in seconds.items()}
    return timed("speed", case, peers, flops=1e14, bytes=1e12)


def rows(records: list[Record]) -> dict[str, bars.Bar]:
    return {bar.work: bar for bar in bars.measured(run(records))}


def test_the_best_plan_of_each_subnetwork_counts_and_the_subnetwork_that_costs_most():
    found = rows(
        layer("4096×4096×4096", 1, automatic=1.2, fused=1.3, rebuild=1.04, where=2.0)
        + layer("4096×4096×4096", 3, automatic=1.01, where=2.0)
    )
    best = found["linear forward, uniform, 4096×4096×4096, best plan"]
    assert (best.ratio.value, best.plan, best.is_met) == (pytest.approx(1.04), "rebuild", True)
    assert best.most == pytest.approx(1 / 0.95)
    assert best.rate == pytest.approx(1e14 / 1.04)
    fused = found["linear forward, uniform, 4096×4096×4096, fused"]
    assert (fused.ratio.value, fused.faster.value, fused.is_met) == (pytest.approx(1.3), pytest.approx(2 / 1.3), True)


@pytest.mark.parametrize(
    ("defaults", "seconds", "where", "is_met"),
    [
        ("uniform", 1.42, 1.5, True),  # 0.70 of cuBLAS
        ("uniform", 1.44, 1.5, False),
        ("uniform", 1.30, 1.2, False),  # slower than where
        ("zeros", 1.17, 1.5, True),  # 0.85 of cuBLAS
        ("zeros", 1.19, 1.5, False),
    ],
)
def test_the_fused_kernel_is_held_to_less_and_to_where(defaults, seconds, where, is_met):
    found = rows(layer("8192×4096×4096", automatic=1.0, fused=seconds, rebuild=1.0, where=where, defaults=defaults))
    assert found[f"linear forward, {defaults}, 8192×4096×4096, fused"].is_met == is_met
    assert ("linear forward, zeros, 8192×4096×4096, best plan" in found) is False


@pytest.mark.parametrize(
    ("active", "seconds", "where", "is_met"),
    [
        (1, (1e12 + 2**24) / COPY / 0.86, 9.0, True),
        (1, (1e12 + 2**24) / COPY / 0.84, 9.0, False),
        (1, (1e12 + 2**24) / COPY / 0.86, 0.5, False),  # 2.5 times as fast as where
    ],
)
def test_few_rows_are_held_to_the_bandwidth_with_the_map_counted(active, seconds, where, is_met):
    (bar,) = rows(layer("16×8192×8192", active, automatic=seconds, fused=seconds, rebuild=9.0, where=where)).values()
    assert bar.work == "linear forward, uniform, 16×8192×8192, over moving its bytes"
    assert bar.ratio.value == pytest.approx(seconds * COPY / (1e12 + 8192 * 2048))
    assert (bar.is_met, bar.least) == (is_met, 2.5)


def test_a_bar_with_a_refused_subnetwork_is_missed():
    records = layer("4096×4096×4096", 1, automatic=None, fused=None, rebuild=None, where=2.0)
    records += layer("4096×4096×4096", 3, automatic=1.0, where=2.0)
    found = rows(records)
    assert not any(bar.is_met for bar in found.values()) and len(found) == 2
    assert "no figure **missed**" in bars.table([run(records)])


def test_gradients_and_convolutions_are_held_by_their_best_plan():
    images = "256×512×7×7, 512×512×3×3, padding 1"
    found = rows(
        layer("4096×4096×4096", work="grad input", automatic=1.08, fused=1.2, rebuild=1.1)
        + layer("8192×4096×4096", work="grad input", automatic=9.0)
        + layer(images, work="grad weight", automatic=1.06, fused=1.2, rebuild=1.1)
        + layer(images, work="training", automatic=9.0)
    )
    assert {name: bar.is_met for name, bar in found.items()} == {
        "linear grad input, uniform, 4096×4096×4096, best plan": True,
        f"conv2d grad weight, uniform, {images}, best plan": False,
    }


def test_the_preset_has_a_row_for_each_bar_of_layers_and_steps():
    options = Options(PRESETS["gpu"], torch.device("cpu"), backends=("triton",))
    records = [
        record
        for suite in ("speed", "optim", "step")
        for workload in SUITES[suite].batch(options).workloads
        for record in timed(suite, workload.case, dict.fromkeys(workload.peers, 1.0), **workload.facts)
    ]
    found = rows(records)
    preset = PRESETS["gpu"]
    kinds = {"linear": 12, "conv2d": 3 * len(preset.conv2d), "Adam's step": 2}
    for kind in ("a step of the weights", "a step of the hyperparameters", "an iteration of a", "an iteration with"):
        kinds[kind] = len(preset.step)
    assert {kind: len([name for name in found if name.startswith(kind)]) for kind in kinds} == kinds
