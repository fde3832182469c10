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

ROOT = Path(__file__).parents[2]


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
def test_a_wrong_result_raises_with_its_error(case, monkeypatch):
    result = Case._result

    def wrong(self, backend, device, dtype):
        return result(self, backend, device, dtype) + (1.0 if backend == "cpu" else 0.0)

    monkeypatch.setattr(Case, "_result", wrong)
    with pytest.raises(AssertionError, match="off by 1"):
        case.error("cpu", CPU)


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_the_smoke_test_fails_without_a_gpu_and_names_each_target():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = run_python("-m", "partbench.gpu.smoke", cwd=ROOT, environment=environment)
    assert done.returncode == 1
    for target in smoke.TARGETS:
        assert f"{target} cannot run: " in done.stdout
