"""`python -m partkernels` prints versions, how the backends were built, and which of them run here."""

from __future__ import annotations

import argparse
import os
import platform

import torch

from partkernels import __version__, build_info
from partkernels.backend.dispatch import READY, backends, requested


def main() -> None:
    what = "Print versions, how the backends were built, and which of them run here."
    argparse.ArgumentParser(prog="python -m partkernels", description=what).parse_args()  # it has no arguments
    print(f"partkernels {__version__} in {build_info.FOLDER}")
    print(f"Python {platform.python_version()}, {platform.platform()}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, requested backend: {requested()}")
    is_own = build_info.folder() == build_info.FOLDER
    print("\nbuild" if is_own else f"\nbuild of {build_info.folder()}, of the same C++ sources")
    for name, value in (build_info.facts() or {"nothing": "setup.py has not run"}).items():
        print(f"  {name:10} {value}")
    print("\nbackends")
    found = backends()
    for name, status in found.items():
        print(f"  {name:10} {status}")
    if found["cpu"] == READY:
        print("\ninstruction sets of the cpu backend")
        try:
            taken = torch.ops.partkernels_cpu.instruction_set()
        except RuntimeError as error:  # no instruction set in PARTKERNELS_CPU_ISA runs here
            taken = None
            print(f"  none: {error}")
        for name, status in _instruction_sets(taken).items():
            print(f"  {name:12} {status}")


def _instruction_sets(taken: str | None) -> dict[str, str]:
    """Return each compiled instruction set of the cpu backend, best first, with 'taken' or why it is not taken."""
    asked = os.environ.get("PARTKERNELS_CPU_ISA")
    found = {}
    for line in torch.ops.partkernels_cpu.instruction_sets().splitlines():
        name, _, lacking = line.partition(":")
        why = f"PARTKERNELS_CPU_ISA={asked} asks for another" if asked else "a better one is taken"
        if name == taken:
            found[name] = "taken"
        elif lacking:
            found[name] = f"not taken: this processor has no {lacking}"
        else:
            found[name] = f"not taken: {why}"
    return found


if __name__ == "__main__":
    main()
