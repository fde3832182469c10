"""A checkout that hides an installed package: which library is used, and the message if none can be used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest
from processes import run_python

from partkernels import build_info
from partkernels.build_info import check_companion, digest

ROOT = Path(__file__).parents[2]
PACKAGE = Path(build_info.__file__).parent


def copy_package(to: Path, *files: str) -> Path:
    """Copy partkernels' Python files, without the outputs of setup.py, and other files of the checkout."""
    shutil.copytree(PACKAGE, to / "partkernels", ignore=shutil.ignore_patterns("_c*", "build_info.json", "__pycache__"))
    for name in files:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, to / name)
    return to / "partkernels"


def build(package: Path, sources: str) -> None:
    shutil.copy(build_info.library("cpu"), package)
    facts = build_info.facts() | {"sources": sources}
    (package / "build_info.json").write_text(json.dumps(facts))


@pytest.fixture
def checkout(tmp_path) -> Path:
    """Return a checkout without a build."""
    copy_package(tmp_path / "checkout", "csrc/include/partkernels/cpu.h")
    return tmp_path / "checkout"


@pytest.fixture
def installed(tmp_path, checkout) -> Path:
    """Return the folder of an installed copy that was built from the same sources."""
    build(copy_package(tmp_path / "installed"), digest(checkout / "csrc"))
    return tmp_path / "installed"


def run(checkout: Path, installed: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run Python in the checkout's root, so that it finds the checkout first."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return run_python(*arguments, cwd=checkout, environment=environment, check=True)


CALL = """
import torch, partkernels as pk
partition = pk.Partition.random((2, 3), (1.0,), seed=0)
print(pk.__file__, pk.explain(pk.linear, torch.ones(1, 3), torch.ones(2, 3), partition, 1))
"""


def test_a_checkout_takes_the_library_of_an_installed_copy_of_the_same_sources(checkout, installed):
    said = run(checkout, installed, "-m", "partkernels").stdout
    assert "cpu        ready" in said
    assert f"in {checkout / 'partkernels'}\n" in said
    assert f"build of {installed / 'partkernels'}, of the same C++ sources\n" in said


def test_a_library_of_other_sources_is_not_used_and_the_first_call_warns(checkout, installed):
    (checkout / "csrc" / "include" / "partkernels" / "cpu.h").write_text("// changed\n")
    done = run(checkout, installed, "-c", CALL)
    assert str(checkout) in done.stdout and "linear: reference" in done.stdout
    (warning,) = [line for line in done.stderr.splitlines() if "UserWarning" in line]
    reason = f"partkernels is imported from the checkout {checkout}, which has no build and hides the one in"
    for part in (f"{reason} {installed / 'partkernels'}", "from another folder", f"--editable .` in {checkout}"):
        assert part in warning


@pytest.fixture
def imported(checkout, monkeypatch):
    """Make this process behave as if partkernels had been imported from the checkout."""
    monkeypatch.setattr(build_info, "FOLDER", checkout / "partkernels")
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    build_info._found.cache_clear()
    yield
    build_info._found.cache_clear()


def test_a_checkouts_own_build_takes_precedence(checkout, installed, imported, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(checkout), str(installed)])
    (checkout / "partkernels" / "build_info.json").write_text('{"cpu": "not built: interrupted"}')
    assert build_info.folder() == checkout / "partkernels" and build_info.library("cpu") is None


def test_an_editable_installation_of_another_checkout_is_found(installed, imported, monkeypatch):
    class Finder:
        @staticmethod
        def find_spec(name, path):
            return spec_from_file_location(name, installed / name / "__init__.py")

    monkeypatch.setattr(sys, "meta_path", [Finder])
    assert build_info.library("cpu") == installed / "partkernels" / "_cpu.so"


def test_without_an_installation_the_facts_name_the_build_command(checkout, imported):
    assert build_info.facts()["cpu"].endswith(f"run `pip install --no-build-isolation --editable .` in {checkout}")


def test_a_digest_knows_names_and_contents(tmp_path):
    for name in ("a/b.h", "c.cu"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    before = digest(tmp_path)
    (tmp_path / "c.cu").write_text("c.cuda")
    changed = digest(tmp_path)
    (tmp_path / "c.cu").rename(tmp_path / "d.cu")
    assert len({before, changed, digest(tmp_path)}) == 3


@pytest.mark.parametrize("layout", ["installed", "checkout"])
def test_a_partkernels_that_differs_from_the_one_beside_partnets_warns(layout, tmp_path, installed):
    folder = tmp_path / "theirs"
    partnets = folder / {"installed": "partnets", "checkout": "python_api/partnets"}[layout]
    partnets.mkdir(parents=True)
    copy_package(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_companion(partnets)  # identical Python files
    with (folder / "partkernels" / "partition.py").open("a") as file:
        file.write("# newer\n")
    with pytest.warns(UserWarning, match=rf"partnets is imported from {partnets} and partkernels from {PACKAGE}"):
        check_companion(partnets)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("_cpu.so", None, "_cpu.*, which was built, is missing; reinstall partkernels"),
        ("build_info.json", "", "build_info.json is damaged"),
        ("build_info.json", "[1]", "build_info.json is damaged"),
        ("build_info.json", '{"cpu": 3}', "build_info.json is damaged"),
    ],
)
def test_missing_or_damaged_build_files_are_named(name, content, message, tmp_path):
    package = copy_package(tmp_path)
    build(package, "any")
    if content is None:
        next(package.glob("_cpu.*")).unlink()
    else:
        (package / name).write_text(content)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PARTKERNELS_BACKEND": "cpu"}
    done = run_python("-c", CALL, cwd=tmp_path, environment=environment)
    assert done.returncode != 0 and message in done.stderr
