"""Tests of the smoke step of `make gpu`: its cases, interpreted, and isolation of crashes, hangs and lost GPUs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from processes import run_python

from partbench.gpu import smoke
from partbench.gpu.cases import CASES, EXACT, Case
from partbench.peers.layer import CPU, DEFAULTS
from partbench.peers.operators import WORKS, obstacles
from partkernels.backend.dispatch import BACKENDS

ROOT = Path(__file__).parents[2]
INTERPRETED = "triton" not in obstacles() and "cpu" in BACKENDS["triton"].devices
# In the interpreter, the others take seconds each.
SMALL = [number for number, case in enumerate(CASES) if case.layer.weight[0] < 64]


def test_there_is_a_case_for_every_operator_kind_and_dtype():
    works = {(case.layer.operator, case.work) for case in CASES}
    assert works >= {(operator, work) for operator in ("linear", "conv2d") for work in WORKS}
    assert {case.work for case in CASES} == {*WORKS, *EXACT, "sgd", "adam", "sgd of 20", "adam of 20", "nested"}
    assert {case.defaults for case in CASES} == set(DEFAULTS)
    assert {case.layer.dtype for case in CASES} == {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    assert len({str(case) for case in CASES}) == len(CASES)


@pytest.mark.cases(usual=12)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_holds_where_there_is_no_gpu(case):
    backend = "cpu" if "cpu" not in obstacles() and case.layer.dtype != torch.float16 else "reference"
    case.error(backend, CPU)


@pytest.mark.parametrize("case", [CASES[0], next(case for case in CASES if case.work in EXACT)], ids=str)
def test_a_wrong_result_is_told(case, monkeypatch):
    result = Case._result

    def wrong(self, backend, device, dtype):
        return result(self, backend, device, dtype) + (1.0 if backend == "cpu" else 0.0)

    monkeypatch.setattr(Case, "_result", wrong)
    with pytest.raises(AssertionError, match="off by 1"):
        case.error("cpu", CPU)


@pytest.mark.full
@pytest.mark.skipif(not INTERPRETED, reason="no interpreter of Triton here")
def test_small_cases_run_interpreted_in_processes():
    said = smoke.run(["triton fused"], SMALL, seconds=600, limit=600)
    assert {CASES[number].work for number, _ in said} == set(WORKS)
    assert not {str(CASES[number]): text for (number, _), text in said.items() if not text.startswith("ok ")}


WORKER = """
import json, os, signal, sys, time
limit, target, *numbers = sys.argv[1:]
for number in map(int, numbers):
    signal.alarm(int(limit.removeprefix("--limit=")))
    if number == 3:
        print("CUDA error: an illegal memory access", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if number == 6:
        time.sleep(60)
    print(json.dumps({"case": number, "said": "RuntimeError: CUDA error" if number == 9 else "ok 0"}), flush=True)
    if number == 9:
        sys.exit(1)
"""


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 3])
def test_a_crash_a_hang_and_a_lost_gpu_cost_one_case_each(processes, tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(smoke, "PROCESSES", processes)
    worker = (sys.executable, str(tmp_path / "worker.py"))
    said = smoke.run(["cuda fused"], range(12), seconds=60, limit=2, worker=worker)
    wrong = {number: text for (number, _), text in said.items() if text != "ok 0"}
    assert len(said) == 12
    assert wrong == {
        3: "died of SIGSEGV: CUDA error: an illegal memory access",
        6: "hangs: nothing in 2 s",
        9: "RuntimeError: CUDA error",
    }


@pytest.mark.full
def test_a_process_that_cannot_start_and_time_that_is_over_are_told(tmp_path):
    (tmp_path / "worker.py").write_text("raise ImportError('no such module')")
    worker = (sys.executable, str(tmp_path / "worker.py"))
    assert set(smoke.run(["cuda fused"], range(2), seconds=60, worker=worker).values()) == {
        "died of exit 1: ImportError: no such module"
    }
    assert set(smoke.run(["cuda fused"], range(2), seconds=0, worker=worker).values()) == {"not run: out of time"}


def test_the_table_has_a_row_for_each_case_and_marks_what_is_wrong():
    table = smoke.table(
        {(0, "cuda fused"): "ok 1.0e-03", (0, "triton fused"): "off by 1|2", (1, "cuda fused"): "ok 2.0e-03"}
    )
    assert table.splitlines() == [
        "| largest error | cuda fused | triton fused |",
        "| --- | --- | --- |",
        f"| {CASES[0]} | 1.0e-03 | **off by 1/2** |",
        f"| {CASES[1]} | 2.0e-03 |  |",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_it_says_so_and_fails():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = run_python("-m", "partbench.gpu.smoke", cwd=ROOT, environment=environment)
    assert done.returncode == 1
    for target in smoke.TARGETS:
        assert f"{target} cannot run: " in done.stdout
