"""Launches on a GPU, which the interpreter cannot check: all compile, and few recompile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tritons import OLDEST, compiling, needs_oldest

pytest.importorskip("triton")
HERE = Path(__file__).parent


@pytest.mark.full
@pytest.mark.parametrize("work", ["compile", "again", pytest.param("compile by the oldest", marks=needs_oldest)])
def test_every_specialisation_compiles_and_no_call_changes_it(work):
    # "again" lists what is compiled again for a value that changes from call to call.
    name, _, is_oldest = work.partition(" ")
    failures = json.loads(compiling(HERE / "specialisations.py", name, triton=OLDEST if is_oldest else None))
    assert not failures, "\n".join(failures)
