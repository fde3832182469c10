"""The headers that C++ and CUDA share, compiled as CUDA. No GPU is needed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="the CUDA compiler, nvcc, is not installed")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_shared_headers_compile_without_warnings_or_spills(architecture, tmp_path):
    command = ["nvcc", f"-arch={architecture}", "-std=c++17", "-Werror", "all-warnings", "-Xptxas", "-v"]
    command += [f"-I{ROOT}/csrc/include", "-c", f"{ROOT}/tests/csrc/headers.cu", "-o", f"{tmp_path}/headers.o"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in done.stderr
