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


@pytest.mark.full
@pytest.mark.parametrize("work", ["compile", "again", pytest.param("corners of the oldest", marks=needs_oldest)])
def test_every_specialisation_compiles_and_no_call_changes_it(work):
    # "again" lists what is compiled again for a value that changes from call to call.
    name, _, is_oldest = work.partition(" ")
    failures = json.loads(compiling(HERE / "specialisations.py", name, triton=OLDEST if is_oldest else None))
    assert not failures, "\n".join(failures)


@pytest.mark.full
def test_huge_weights_and_batches_have_grids_that_cuda_launches():
    launches = json.loads(compiling(HERE / "grids.py"))
    too_large = [launch for launch in launches if any(n > most for n, most in zip(launch[-1], MOST, strict=False))]
    assert launches and not too_large, "\n".join(map(str, too_large))
