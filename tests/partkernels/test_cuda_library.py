"""The CUDA library of a wheel, inspected without a GPU by the toolkit's tools."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton's package contains the disassembler")

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / "build" / "wheel"


@pytest.fixture(scope="module")
def wheel() -> Path:
    """Return the wheel with the CUDA library that `make wheel` has built of these sources."""
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()] + [ROOT / "setup.py"]
    newest = max(path.stat().st_mtime for path in sources)
    for path in WHEELS.glob("*.whl"):
        if path.stat().st_mtime > newest and "partkernels/_cuda.so" in zipfile.ZipFile(path).namelist():
            return path
    pytest.skip("build/wheel has no CUDA library of these sources; PARTKERNELS_BUILD=cuda builds one in six minutes")


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def machine_code(unpacked) -> dict[tuple[str, str], str]:
    """Return the disassembly of each kernel, by architecture and mangled name."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    command = [tools / "cuobjdump", "--dump-sass", unpacked / "partkernels" / "_cuda.so"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code = {}
    for image in re.split(r"\n\s*code for ", listing)[1:]:
        architecture = image.split(None, 1)[0]
        for function in image.split("Function : ")[1:]:
            name, body = function.split("\n", 1)
            code[architecture, name] = body
    return code


def test_no_kernel_spills_or_was_compiled_with_a_warning(wheel):
    reports = {path.stem: path.read_text() for path in (ROOT / "build").glob("temp*/cuda/*.txt")}
    assert {"hopper_linear", "linear_few_rows"} <= reports.keys()
    for name, report in reports.items():
        output = report.partition("\n")[2]
        assert "warning" not in output.lower(), f"{name}: {output}"
        frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", output)
        assert all(frame == ("0", "0", "0") for frame in frames), name
        assert name.startswith("binding") or name in ("launch", "linear") or frames, f"{name} has no kernel"


@pytest.mark.parametrize(
    ("architecture", "kernel", "product", "copy"),
    [
        ("sm_80", "few_rows", "HMMA", "LDGSTS"),
        ("sm_90a", "few_rows", "HMMA", "LDGSTS"),
        ("sm_90a", "hopper_linear", "HGMMA", "UTMALDG"),
    ],
)
def test_products_run_on_tensor_cores_from_asynchronous_copies(machine_code, architecture, kernel, product, copy):
    bodies = [body for (built, name), body in machine_code.items() if built == architecture and kernel in name]
    assert bodies and all(f"{product}." in body for body in bodies)
    assert any(copy in body for body in bodies)


def test_no_wait_empties_the_first_level_cache(machine_code):
    hopper = [body for (_, name), body in machine_code.items() if "hopper" in name]
    assert hopper and all("SYNCS" in body and "CCTL" not in body for body in hopper)


def test_no_local_memory_is_touched(machine_code):
    assert machine_code
    assert not [name for name, body in machine_code.items() if re.search(r"\b(LDL|STL)\b", body)]


def test_the_wheel_reports_its_architectures_and_imports_without_a_gpu(unpacked):
    facts = json.loads((unpacked / "partkernels" / "build_info.json").read_text())
    assert facts["cuda"] == "built for sm_80, PTX 80, sm_90a"
    program = """
import partkernels, torch
print(partkernels.backends()["cuda"])
try:
    partkernels.use_backend("cuda").__enter__()
except RuntimeError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": str(unpacked), "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment, cwd=unpacked
    )
    status, error = result.stdout.strip().split("\n")
    assert status == "built for sm_80, PTX 80, sm_90a; no GPU, or PyTorch was built without CUDA"
    assert error.startswith("The backend 'cuda' cannot run this: built for sm_80") and "Ready here: " in error


def _symbols(library: Path, which: str) -> set[tuple[str, str]]:
    """Return (kind, name without version) of the dynamic symbols that a library defines or leaves undefined."""
    listing = subprocess.run(
        ["nm", "-D", f"--{which}-only", library], capture_output=True, text=True, check=True
    ).stdout
    return {(kind, name.partition("@")[0]) for *_, kind, name in map(str.split, listing.splitlines())}


@pytest.mark.parametrize("name", ["_cpu.so", "_cuda.so"])
def test_every_undefined_symbol_is_found_in_the_libraries_that_a_backend_needs(unpacked, name):
    library = unpacked / "partkernels" / name
    environment = {**os.environ, "LD_LIBRARY_PATH": str(Path(torch.__file__).parent / "lib")}
    loaded = subprocess.run(["ldd", library], capture_output=True, text=True, check=True, env=environment).stdout
    paths = {path.name: path for path in map(Path, re.findall(r"(/\S+) \(0x", loaded))}
    dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    found = {name for each in needed for _, name in _symbols(paths[each], "defined")}
    missing = {(kind, symbol) for kind, symbol in _symbols(library, "undefined") if symbol not in found}
    # The toolchain's weak symbols, which no library defines. Ours must not be weak: a weak function could be null.
    own = {"_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__gmon_start__"}
    assert missing == {("w", symbol) for symbol in own}
