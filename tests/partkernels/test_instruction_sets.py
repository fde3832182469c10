"""The instruction set of the cpu backend: which is taken, and the message for one that is unknown."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from against_dense import BACKENDS
from processes import run_python

NAMES = ["portable", "avx2", "avx512", "avx512_bf16", "avx512_amx"]
ARMS = ["neon_bf16", "portable"]
pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="the cpu backend was not built")


def in_a_process(name: str, *arguments: str) -> subprocess.CompletedProcess:
    # A process chooses its instruction set only once.
    environment = os.environ | {"PARTKERNELS_CPU_ISA": name, "TRITON_INTERPRET": "0"}
    return run_python(*arguments, environment=environment, cwd=Path(__file__).parents[2])


INSTRUCTION_SET = (
    "import torch, partkernels; partkernels.backends(); print(torch.ops.partkernels_cpu.instruction_set())"
)


def test_the_report_names_the_instruction_set_in_use_and_why_others_are_not():
    told = in_a_process("portable", "-m", "partkernels").stdout.partition("instruction sets of the cpu backend\n")[2]
    said = dict(line.split(maxsplit=1) for line in told.splitlines())
    assert sorted(said) == sorted(NAMES) or list(said) in (ARMS, ["portable"])
    assert said.pop("portable") == "taken"
    why = "not taken: this processor has no ", "not taken: PARTKERNELS_CPU_ISA=portable asks for another"
    assert all(status.startswith(why) for status in said.values())


def test_an_unknown_instruction_set_is_refused_with_those_that_run():
    asked = in_a_process("sse9", "-c", INSTRUCTION_SET)
    assert asked.returncode != 0
    assert "PARTKERNELS_CPU_ISA='sse9' is not an instruction set" in asked.stderr and "portable" in asked.stderr
