"""Installation with and without a compiler, and the report of `python -m partkernels` on it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
import pytest
import torch
import yaml
from processes import run_python

from partkernels import __version__
from partkernels.build_info import digest

ROOT = Path(__file__).parents[1]
# A compiler in sh.
MAKES_A_FILE = 'while test $# -gt 0; do test "$1" = -o && : > "$2"; shift; done; exit 0'


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """Build the backends into a folder with setup.py."""
    command = [ROOT / "setup.py", "build_ext", "--build-lib", folder, "--build-temp", folder / "temp"]
    environment = {**{k: v for k, v in os.environ.items() if k not in ("CXX", "PARTKERNELS_BUILD")}, **environment}
    return run_python(*command, cwd=ROOT, environment=environment)


def facts(folder: Path) -> dict[str, str]:
    return json.loads((folder / "partkernels" / "build_info.json").read_text())


@pytest.mark.full
def test_without_a_compiler_installation_succeeds_and_says_how_to_get_one(tmp_path):
    done = build(tmp_path, PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "there is no C++ compiler; install one (on Debian: apt install g++)" in facts(tmp_path)["cpu"]


def test_a_failing_compiler_does_not_fail_the_installation_either(tmp_path):
    done = build(tmp_path, CXX="false")
    assert done.returncode == 0, done.stderr
    assert "then reinstall partkernels with PARTKERNELS_BUILD=cpu" in facts(tmp_path)["cpu"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"PARTKERNELS_BUILD": "cpu", "CXX": "/nowhere/g++ -pipe"},
            "there is no C++ compiler; CXX is '/nowhere/g++ -pipe'; set it to one",
        ),
        ({"PARTKERNELS_BUILD": "cpu", "CXX": "false"}, "returned non-zero exit status"),
        ({"PARTKERNELS_BUILD": "magic"}, "PARTKERNELS_BUILD=magic is not a known backend"),
        ({"PARTKERNELS_BUILD": "cuda", "CUDA_HOME": "/nowhere"}, "there is no nvcc; install the CUDA toolkit"),
        ({"PARTKERNELS_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": "7.5"}, "7.5; the CUDA backend needs 8.0 or newer"),
        ({"PARTKERNELS_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": "Hopper"}, "has Hopper; pass compute capabilities"),
    ],
)
def test_a_build_that_was_asked_for_and_fails_is_an_error(environment, message, tmp_path):
    done = build(tmp_path, **environment)
    assert done.returncode != 0
    assert message in done.stderr


def test_kernels_are_compiled_in_the_same_way_in_every_environment(tmp_path):
    """An environment with another Python or PyTorch then needs to compile the binding only."""
    (tmp_path / "c++").write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/commands; {MAKES_A_FILE}\n')
    (tmp_path / "c++").chmod(0o755)
    done = build(tmp_path, PARTKERNELS_BUILD="cpu", CXX=str(tmp_path / "c++"))
    assert done.returncode == 0, done.stderr
    commands = (tmp_path / "commands").read_text().splitlines()
    kernels = [re.findall(r"-I *(\S+)", command) for command in commands if "-c csrc/cpu/" in command]
    assert len(kernels) == len([*(ROOT / "csrc" / "cpu").glob("*.cpp")])
    assert kernels == [["csrc/include"]] * len(kernels)


@pytest.mark.full
def test_a_backend_that_is_built_is_known_before_another_one_fails(tmp_path):
    for name, program in {"c++": MAKES_A_FILE, "nvcc": "exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = build(tmp_path, PARTKERNELS_BUILD="cuda", CXX="env A=1 c++", CUDA_HOME="", PATH=path)
    assert done.returncode != 0
    assert facts(tmp_path)["cpu"] == "built" and "cuda" not in facts(tmp_path)
    assert facts(tmp_path)["compiler"] == "env A=1 c++" and "nvcc" in done.stderr


def test_without_torch_installation_says_in_one_line_to_install_it_first():
    code = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path('setup.py')"
    done = run_python("-c", code, cwd=ROOT)
    assert done.returncode == 1
    assert re.fullmatch(r".*; install torch first: pip install 'torch>=2.10'\n", done.stderr)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_binding_compiles_with_headers_without_array_comparison(tmp_path):
    header = Path("torch", "headeronly", "util", "HeaderOnlyArrayRef.h")
    include = Path(torch.__file__).parent / "include"
    without = re.sub(r"  friend bool operator[!=]=\(.*?\n  }\n", "", (include / header).read_text(), flags=re.DOTALL)
    (tmp_path / header).parent.mkdir(parents=True)
    (tmp_path / header).write_text(without)
    (tmp_path / "binding.cpp").write_text('#include "backend.h"\n#include "checks.h"\n')
    folders = (tmp_path, "csrc/include", "csrc/cpu", "csrc/torch", "csrc/torch/cpu", include)
    options = ["-std=c++20", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-fsyntax-only"]
    command = ["g++", *options, *(f"-I{folder}" for folder in folders), tmp_path / "binding.cpp"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_backend_is_built_when_none_is_asked_for(tmp_path):
    assert build(tmp_path, PARTKERNELS_BUILD="none").returncode == 0
    assert "PARTKERNELS_BUILD=none" in facts(tmp_path)["cpu"]
    assert facts(tmp_path)["sources"] == digest(ROOT / "csrc")
    assert not list(tmp_path.rglob("_cpu.*"))


def test_the_citation_has_the_version_of_the_package_and_workflows_are_yaml():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    for workflow in (ROOT / ".github").glob("*/*.yml"):
        assert yaml.safe_load(workflow.read_text()), workflow


@pytest.mark.full
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout")
def test_a_source_distribution_has_every_file_but_those_of_the_repository_itself(tmp_path):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    done = run_python("setup.py", "--quiet", "egg_info", "--egg-base", tmp_path, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    listed = (tmp_path / "partkernels.egg-info" / "SOURCES.txt").read_text().split()
    missing = {path for path in tracked.split() if (ROOT / path).exists()} - set(listed)
    assert {path for path in missing if not path.startswith((".ci/", ".git"))} == set()
    # Installed elsewhere, this machine's library would pass for a finished build.
    assert not {"partkernels/_cpu.so", "partkernels/build_info.json"} & set(listed)


@pytest.mark.full
def test_a_source_distribution_installs_every_file_of_the_packages(tmp_path):
    done = run_python("setup.py", "--quiet", "sdist", "--dist-dir", tmp_path, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation"]
    environment = {**os.environ, "PARTKERNELS_BUILD": "none"}
    done = subprocess.run(
        [*command, "--target", tmp_path / "to", archive], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    folders = {"partkernels": ROOT, "partnets": ROOT / "python_api", "partbench": ROOT / "benchmarks"}
    for name, parent in folders.items():
        files = {
            path.relative_to(parent) for path in (parent / name).rglob("*.*") if path.suffix not in (".pyc", ".so")
        }
        assert {path for path in files if not (tmp_path / "to" / path).exists()} == set()


@pytest.mark.full
def test_a_source_distribution_for_numpy_has_the_kernels(tmp_path):
    code = "import sys, scikit_build_core.build as build; build.build_sdist(sys.argv[1])"
    done = run_python("-c", code, tmp_path, cwd=ROOT / "numpy_api")
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    for part in ("csrc/cpu", "csrc/include", "csrc/numpy", "cmake"):
        assert [path.name for path in sorted((folder / part).rglob("*.*"))] == [
            path.name for path in sorted((ROOT / part).rglob("*.*"))
        ]
    options = {"PARTKERNELS_NUMPY": "ON", "PARTKERNELS_CUDA": "OFF", "BUILD_TESTING": "OFF"}
    options |= {
        "PYBIND11_FINDPYTHON": "ON",
        "pybind11_DIR": pybind11.get_cmake_dir(),
        "Python_EXECUTABLE": sys.executable,
    }
    command = ["cmake", "-S", folder, "-B", tmp_path / "build", *(f"-D{name}={one}" for name, one in options.items())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
