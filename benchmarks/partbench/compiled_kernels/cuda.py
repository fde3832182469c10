"""The CUDA backend's bfloat16 kernels, read from the library's object files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from partbench.compiled_kernels.code import costs, dumped, functions, left_entries, sass
from partbench.compiled_kernels.kernels import Kernel

ROOT = Path(__file__).parents[3]
# Warps that multiply, in every kernel with products; on Hopper, other warps fetch.
WARPS = 8
ENUMERATORS = {"DefaultKind": ("zeros", "uniform", "normal", "stored")}


def objects() -> list[Path]:
    """Return the object files of a build that is newer than all sources; empty without one."""
    newest = max(path.stat().st_mtime for path in (ROOT / "csrc").rglob("*") if path.is_file())
    folders = {path.parent for path in (ROOT / "build").glob("temp*/cuda/*.txt")}
    for folder in sorted(folders):
        reports = [path for path in folder.glob("*.txt") if (ROOT / "csrc" / "cuda" / f"{path.stem}.cu").exists()]
        if len(reports) == len(list((ROOT / "csrc" / "cuda").glob("*.cu"))) and all(
            report.stat().st_mtime > newest for report in reports
        ):
            return sorted(report.with_suffix(".o") for report in reports)
    return []


def build() -> list[Path]:
    """Return the object files, compiled if needed; empty without the CUDA compiler."""
    if not objects() and shutil.which("nvcc"):
        environment = {**os.environ, "PARTKERNELS_BUILD": "cuda"}
        subprocess.run([sys.executable, "setup.py", "-q", "build_cuda"], cwd=ROOT, env=environment, check=True)
    return objects()


def compiler() -> str:
    """Return the CUDA compiler's version."""
    said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release (\S+),", said)[1]


def compiled(files: list[Path]) -> list[Kernel]:
    return [kernel for file in files for kernel in _compiled(file)]


def _compiled(file: Path) -> list[Kernel]:
    found = functions(dumped(file, "--dump-sass"))
    usage = {}
    for image in dumped(file, "--dump-resource-usage").split("arch = ")[1:]:
        for function in re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", image):
            usage[image.split(None, 1)[0], function[0]] = [int(number) for number in function[1:]]
    names = _demangled([name for _, name, _ in found])
    kernels = []
    for (architecture, mangled, code), (name, arguments) in zip(found, names, strict=True):
        if "bfloat16" not in arguments:
            continue
        registers, stack = usage[architecture, mangled]
        said = costs(sass(code), WARPS, left_entries)
        how = {"registers": registers, "spilled": stack, "warps": WARPS}
        kernels.append(Kernel(architecture.removesuffix("a"), ", ".join(arguments), name=name, **how, **said))
    return kernels


def _demangled(names: list[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Return each kernel's name and template arguments."""
    said = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    found = []
    for line in said.splitlines():
        line = re.sub(r"\((?:\w+::)*(\w+)\)(\d+)", lambda of: ENUMERATORS[of[1]][int(of[2])], line)
        line = re.sub(r"\(anonymous namespace\)::|(?:\w+::)+", "", line).removeprefix("void ")
        name, _, rest = line.partition("<")
        found.append((name.partition("(")[0], tuple(re.split(r",\s*", rest.partition(">(")[0])) if rest else ()))
    return found
