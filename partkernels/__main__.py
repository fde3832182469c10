"""`python -m partkernels`: versions, how the backends were built, and which of them run here."""

from __future__ import annotations

import platform

import torch

from partkernels import __version__, build_info
from partkernels.backend.dispatch import backends, requested


def main() -> None:
    print(f"partkernels {__version__} in {build_info.FOLDER}")
    print(f"Python {platform.python_version()}, {platform.platform()}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, requested backend: {requested()}")
    is_own = build_info.folder() == build_info.FOLDER
    print("\nbuild" if is_own else f"\nbuild of {build_info.folder()}, of the same C++ sources")
    for name, value in (build_info.facts() or {"nothing": "setup.py has not run"}).items():
        print(f"  {name:10} {value}")
    print("\nbackends")
    for name, status in backends().items():
        print(f"  {name:10} {status}")


if __name__ == "__main__":
    main()
