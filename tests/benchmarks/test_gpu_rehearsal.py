"""Tests of the suites' work on a GPU, in Triton's interpreter: plans as peers, and tuning."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch

from partbench import tune
from partbench.cli import main
from partbench.measuring.timing import Missing
from partbench.peers import operators
from partbench.peers.layer import THREE, Layer, Partitioning, Tensors
from partbench.presets import PRESETS
from partbench.report import page, readme
from partbench.results import Results
from partbench.suites import SUITES, speed
from partbench.suites.options import Options
from partkernels.backend.dispatch import BACKENDS, READY, noting

PEERS = {"partkernels triton fused", "partkernels triton rebuild"}
interpreted = pytest.mark.skipif(
    BACKENDS["triton"].status() != READY or "cpu" not in BACKENDS["triton"].devices,
    reason="no interpreter of Triton here",
)
LINEAR = Layer((4, 48), (32, 48))


def peers(work: str, active: int, backend: str = "triton") -> set[str]:
    (workload,) = speed.workloads([LINEAR], [THREE], [active], [backend], works=[work])
    return set(workload.peers)


def test_plans_are_peers_where_there_is_something_to_plan():
    assert peers("forward", 1) >= PEERS
    assert not peers("grad_weight", 1) & PEERS
    assert not peers("forward", 3) & PEERS, "all is live: PyTorch's operator runs"
    assert not peers("training", 1) & PEERS
    assert not peers("forward", 1, "cpu") & PEERS


def test_the_zeros_row_is_measured_only_for_linear_forward():
    preset = dataclasses.replace(PRESETS["tiny"], forward_defaults=("zeros",))
    cases = [workload.case for workload in SUITES["speed"].batch(Options(preset)).workloads]
    zeros = {(case["operator"], case["work"]) for case in cases if case["defaults"] == "zeros"}
    assert zeros == {("linear", "forward")}
    assert len({tuple(case.items()) for case in cases}) == len(cases)
    asked = Options(preset, partitionings=(Partitioning(defaults="zeros"),))
    cases = [tuple(workload.case.items()) for workload in SUITES["speed"].batch(asked).workloads]
    assert len(set(cases)) == len(cases), "what was asked for is not measured twice"


@interpreted
def test_every_plan_is_measured_and_has_its_own_row(tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", dataclasses.replace(PRESETS["tiny"], forward_defaults=("zeros",)))
    path = tmp_path / "speed.json"
    command = ["speed", "--preset", "tiny", "--device", "cpu", "--backends", "triton", "--linear", "4x32x48"]
    command += ["--works", "forward", "--active", "1", "--passes", "1"]
    assert main([*command, "--out", str(path)]) == 0
    results = Results.load(path)
    assert {(r.case["defaults"], r.peer) for r in results.records if r.samples and r.peer in PEERS} == {
        (kind, peer) for kind in ("uniform", "zeros") for peer in PEERS
    }
    table = readme.tables([results])
    for kind in ("uniform", "zeros"):
        for peer in ("partkernels triton", *PEERS):
            assert table.count(f"| linear forward, float32, 2-bit map, {kind}, `{peer}`, 1 shapes |") == 1
    html = page([results])
    for plan in operators.PLANS:
        assert f"ours, on the backend triton, always by the plan {plan}" in html


@interpreted
def test_a_plan_that_does_not_serve_a_product_has_no_figure():
    layer = Layer((2, 4), (4, 4), dtype=torch.float64)
    named = operators.peers(("partkernels triton fused",), "forward", 1)
    with pytest.raises(Missing, match="no float64"):
        named["partkernels triton fused"](Tensors(layer, THREE, 0))


@pytest.fixture
def tuned(tmp_path, monkeypatch) -> Path:
    """Return an empty folder for measurements, and make the plan that is measured last, rebuilding, the fastest."""
    from partkernels.backend.triton import plans

    folder = tmp_path / "measured"
    monkeypatch.setenv("PARTKERNELS_CACHE", str(folder))
    times = itertools.count(1000, -1)
    monkeypatch.setattr(plans, "clock", lambda call: float(call() is None) + next(times))
    return folder


COMMAND = ["--preset", "tiny", "--device", "cpu"]


@pytest.mark.full
@interpreted
def test_the_suites_run_with_the_plans_that_tuning_saved(tuned, capsys):
    assert tune.main([*COMMAND, "--out", str(tuned)]) == 0
    assert "1 of 1 products are tuned" in capsys.readouterr().out
    (path,) = tuned.iterdir()
    m, n, k = PRESETS["tiny"].linear[0]
    (record,) = json.loads(path.read_text())
    assert record["sizes"] == [n, m, k]
    with noting() as notes:
        operators.ours(Tensors(Layer((m, k), (n, k)), THREE, 0), "forward", 1, "triton")()
    assert "rebuild" in notes[0] and "measured on this" in notes[0]
