"""A check for `make lint` that neither the files of a package nor its folders import each other in cycles.

Imports inside functions and under TYPE_CHECKING count as well.

usage: python tests/imports.py
"""

from __future__ import annotations

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {"partkernels": ROOT, "partkernels_numpy": ROOT / "numpy_api", "partnets": ROOT / "python_api"}

COMPILED = {"partkernels_numpy._library"}  # compiled modules import no Python module of a package


def modules(package: str) -> dict[str, Path]:
    """Return the file of each module of a package, by the module's dotted name."""
    base = PACKAGES[package]
    found = {}
    for path in sorted((base / package).rglob("*.py")):
        parts = path.relative_to(base).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """Return those of the known modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {part if part in known else node.module for part in parts - COMPILED}
    return names & known.keys()


def room(module: str) -> str:
    """Return the folder of a module; a file beside the folders counts as a separate folder."""
    return ".".join(module.split(".")[:2])


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return one cycle of a graph, or an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def circles(package: str) -> list[list[str]]:
    """Return a cycle of files and a cycle of folders, if any."""
    known = modules(package)
    files = {name: imported(path, known) - {name} for name, path in known.items()}
    rooms: dict[str, set[str]] = {}
    for name, targets in files.items():
        if name != package:  # a package's __init__.py imports its public names from all folders
            rooms.setdefault(room(name), set()).update(room(target) for target in targets)
    return [found for graph in (files, {name: to - {name} for name, to in rooms.items()}) if (found := circle(graph))]


if __name__ == "__main__":
    found = [" -> ".join(reversed(one)) for package in PACKAGES for one in circles(package)]
    print("\n".join(f"circular import: {one}" for one in found), end="\n" if found else "")
    sys.exit(bool(found))
