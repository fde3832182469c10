"""Checks that imports have no circles, for `make lint`: neither the files of a package nor its folders.

Imports inside of functions and for type checkers count as well.

usage: python tests/imports.py
"""

from __future__ import annotations

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {"partkernels": ROOT, "partkernels_numpy": ROOT / "numpy_api", "partnets": ROOT / "python_api"}

COMPILED = {"partkernels_numpy._library"}  # which import nothing of a package


def modules(package: str) -> dict[str, Path]:
    """The file of each module of a package, by its dotted name."""
    base = PACKAGES[package]
    found = {}
    for path in sorted((base / package).rglob("*.py")):
        parts = path.relative_to(base).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """Which of the known modules a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {part if part in known else node.module for part in parts - COMPILED}
    return names & known.keys()


def room(module: str) -> str:
    """The folder of a module; a file beside the folders is one of its own."""
    return ".".join(module.split(".")[:2])


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of a graph, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def circles(package: str) -> list[list[str]]:
    """A circle of files and one of folders, if there are any."""
    known = modules(package)
    files = {name: imported(path, known) - {name} for name, path in known.items()}
    rooms: dict[str, set[str]] = {}
    for name, targets in files.items():
        if name != package:  # what a package offers, it imports from all over
            rooms.setdefault(room(name), set()).update(room(target) for target in targets)
    return [found for graph in (files, {name: to - {name} for name, to in rooms.items()}) if (found := circle(graph))]


if __name__ == "__main__":
    found = [" -> ".join(reversed(one)) for package in PACKAGES for one in circles(package)]
    print("\n".join(f"a circle of imports: {one}" for one in found), end="\n" if found else "")
    sys.exit(bool(found))
