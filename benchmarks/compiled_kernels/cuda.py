"""Every kernel of the CUDA backend that works on bfloat16, as the library's objects have it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.compiled_kernels.kernels import Kernel, costs, dumped, functions
from benchmarks.compiled_kernels.sass import BITS, Loop

ROOT = Path(__file__).parents[2]
# Of every kernel that multiplies, the warps that do; on Hopper others fetch.
WARPS = 8
# Tiles of the result that a block makes: down and across, one of which may be a template argument. Kernels that the
# copy engine serves must be here, and those whose products' left operand is not the weight.
TILES = {
    "hopper_linear": (128, None),
    "hopper_grad_input": (256, 128),
    "mma_product": (128, None),
}
ENUMERATORS = {
    "DefaultKind": ("zeros", "uniform", "normal", "stored"),
    "Work": ("forward", "grad_input"),
}


def objects() -> list[Path]:
    """The object files that a build left, if they are of the sources as they are; else none."""
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
    """The same, compiled where they are not; none without the CUDA compiler."""
    if not objects() and shutil.which("nvcc"):
        environment = {**os.environ, "PARTKERNELS_BUILD": "cuda"}
        subprocess.run([sys.executable, "setup.py", "-q", "build_cuda"], cwd=ROOT, env=environment, check=True)
    return objects()


def compiler() -> str:
    """The CUDA compiler's version."""
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
        target = architecture.removesuffix("a")
        registers, stack = usage[architecture, mangled]
        rebuilt = partial(_rebuilt, name, arguments)
        said = costs(code, target, WARPS, rebuilt, partial(_copied, name, arguments) if "UTMALDG" in code else None)
        kernels.append(
            Kernel(target, ", ".join(arguments), name=name, registers=registers, spilled=stack, warps=WARPS, **said)
        )
    return kernels


def _demangled(names: list[str]) -> list[tuple[str, tuple[str, ...]]]:
    """The name of each kernel and its template arguments."""
    said = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    found = []
    for line in said.splitlines():
        line = re.sub(r"\((?:\w+::)*(\w+)\)(\d+)", lambda of: ENUMERATORS[of[1]][int(of[2])], line)
        line = re.sub(r"\(anonymous namespace\)::|(?:\w+::)+", "", line).removeprefix("void ")
        name, _, rest = line.partition("<")
        found.append((name.partition("(")[0], tuple(re.split(r",\s*", rest.partition(">(")[0])) if rest else ()))
    return found


def tile(name: str, arguments: tuple[str, ...]) -> tuple[int, int]:
    """Of a kernel in TILES."""
    numbers = [int(argument) for argument in arguments if argument.isdecimal()]
    return tuple(size or numbers[0] for size in TILES[name])


def _rebuilt(name: str, arguments: tuple[str, ...], loop: Loop) -> float:
    if name in ("hopper_grad_input", "mma_product"):
        # What is down are rows of x.
        return loop.multiply_adds / tile(name, arguments)[0]
    return loop.left_entries


def _copied(name: str, arguments: tuple[str, ...], loop: Loop) -> float:
    """Bytes of 16-bit operands and of the map."""
    down, across = tile(name, arguments)
    terms = loop.multiply_adds / (down * across)
    stored = _rebuilt(name, arguments, loop) if "stored" in arguments else 0
    return 2 * terms * (down + across) + 2 * stored + _rebuilt(name, arguments, loop) * BITS / 8
