"""The operators' tests on each instruction set that this processor supports."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from against_dense import BACKENDS
from processes import run_python

NAMES = ["portable", "avx2", "avx512", "avx512_bf16", "avx512_amx"]
ARMS = ["neon_bf16", "portable"]
# Tests that depend on vector instructions: results, strides, defaults and maps; not schemas or error messages.
TESTS = "dense_pytorch or deep_products or workspace or strides or kind_of_defaults or has_the_bits or stride_0"

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="the cpu backend was not built")


def in_a_process(name: str, *arguments: str) -> subprocess.CompletedProcess:
    # A process chooses its instruction set only once.
    environment = os.environ | {"PARTKERNELS_CPU_ISA": name, "TRITON_INTERPRET": "0"}
    return run_python(*arguments, environment=environment, cwd=Path(__file__).parents[2])


INSTRUCTION_SET = (
    "import torch, partkernels; partkernels.backends(); print(torch.ops.partkernels_cpu.instruction_set())"
)


# The C++ tests cover each instruction set in the usual run too.
@pytest.mark.weekly
@pytest.mark.parametrize("name", NAMES)
def test_operators_are_right_on_each_instruction_set(name):
    if torch.ops.partkernels_cpu.instruction_set() == name:
        pytest.skip("the other tests run on this instruction set")
    asked = in_a_process(name, "-c", INSTRUCTION_SET)
    if asked.returncode != 0:
        assert "cannot run on this processor; unset it, or set it to one of" in asked.stderr
        pytest.skip(f"this processor has no {name}")
    assert asked.stdout.strip() == name
    tests = [str(Path(__file__).parent / file) for file in ("test_operators.py", "test_entries.py")]
    done = in_a_process(name, "-m", "pytest", "-q", "-x", "-k", f"{TESTS} or test_entries", *tests)
    assert done.returncode == 0, done.stdout[-4000:]


def test_the_report_says_which_is_taken_and_why_the_others_are_not():
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


def test_the_report_of_an_unknown_instruction_set_says_so_and_why_others_could_not_run():
    done = in_a_process("sse9", "-m", "partkernels")
    assert done.returncode == 0, done.stderr
    told = done.stdout.partition("instruction sets of the cpu backend\n")[2].splitlines()
    assert told[0].strip().startswith("none: PARTKERNELS_CPU_ISA='sse9' is not an instruction set; unset it")
    said = dict(line.split(maxsplit=1) for line in told[1:])
    assert said["portable"] == "not taken: PARTKERNELS_CPU_ISA=sse9 asks for another"
