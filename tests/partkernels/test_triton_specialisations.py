"""Every Triton kernel compiles for whatever arguments its launches give it, of which its interpreter says nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tritons import compiling

pytest.importorskip("triton")
SPECIALISATIONS = Path(__file__).with_name("specialisations.py")


@pytest.mark.parametrize("work", ["translate", "compile"])
def test_every_kernel_compiles_in_every_specialisation(work):
    failures = json.loads(compiling(SPECIALISATIONS, work))
    assert not failures, "\n".join(failures)
