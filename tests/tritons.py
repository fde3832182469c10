"""Processes that compile Triton kernels ahead of time with the installed or the oldest supported Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OLDEST = ROOT / "build" / "triton-3.6"
needs_oldest = pytest.mark.skipif(
    not OLDEST.exists(), reason="Triton 3.6 is not installed; make build/triton-3.6 fetches it"
)


def compiling(*command: str | Path, triton: Path | None = None, **settings: str) -> str:
    """Return the standard output of a Python process that compiles Triton kernels instead of interpreting them.

    Args:
        triton: the folder of a Triton version to use instead of the installed one.
        settings: environment variables to set.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= settings
    folders = [*([triton] if triton else []), ROOT, ROOT / "python_api", ROOT / "benchmarks"]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
