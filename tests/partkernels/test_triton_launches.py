"""Launches on a GPU, which the interpreter cannot check: all compile, few recompile, and no grid is too large."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tritons import OLDEST, compiling, needs_oldest

pytest.importorskip("triton")
HERE = Path(__file__).parent
# CUDA's maximal number of programs along each dimension.
MOST = (1 << 31) - 1, 65535, 65535


# "corners" and "pairs" compile to Triton's IR, which reveals most errors; "compile" generates machine code.
@pytest.mark.full
@pytest.mark.parametrize(
    "work", ["corners", *(pytest.param(work, marks=pytest.mark.weekly) for work in ("pairs", "compile"))]
)
def test_every_kernel_compiles_in_every_specialisation(work):
    failures = json.loads(compiling(HERE / "specialisations.py", work))
    assert not failures, "\n".join(failures)


@needs_oldest
@pytest.mark.weekly
def test_the_oldest_triton_takes_every_kernel():
    failures = json.loads(compiling(HERE / "specialisations.py", "corners", triton=OLDEST))
    assert not failures, "\n".join(failures)


@pytest.mark.weekly
def test_what_changes_from_call_to_call_compiles_no_kernel_again():
    assert json.loads(compiling(HERE / "specialisations.py", "again")) == []


@pytest.mark.full
def test_huge_weights_and_batches_have_grids_that_cuda_launches():
    launches = json.loads(compiling(HERE / "grids.py"))
    too_large = [launch for launch in launches if any(n > most for n, most in zip(launch[-1], MOST, strict=False))]
    assert launches and not too_large, "\n".join(map(str, too_large))
