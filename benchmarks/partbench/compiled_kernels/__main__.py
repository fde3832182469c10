"""compiled_kernels: a table of both GPU backends' compiled kernels, made without a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from partbench.compiled_kernels import cuda, triton
from partbench.compiled_kernels.kernels import ABOUT, CUDA, TRITON, section


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m partbench.compiled_kernels", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the table, in Markdown")
    targets = list(triton.TARGETS)
    parser.add_argument("--targets", nargs="+", choices=targets, default=targets, help="Triton's for these alone")
    parser.add_argument("--json", action="store_true", help="write the kernels to standard output as well")
    parser.add_argument(
        "--built", action="store_true", help="read the CUDA library if it is built, instead of compiling it"
    )
    given = parser.parse_args(arguments)
    files = []
    if given.targets == targets:
        if not (cuda.ROOT / "csrc").exists():
            parser.error("compiling csrc needs a checkout; install one with --editable, or pass --targets")
        files = cuda.objects() if given.built else cuda.build()
    kernels, library = triton.compiled(given.targets), cuda.compiled(files)
    parts = [ABOUT]
    for name, target in triton.TARGETS.items():
        title = f"Triton {version('triton')}, {name}: {target.gpu}, {target.shared_memory >> 10} KB"
        parts.append(section(title, TRITON, [kernel for kernel in kernels if kernel.target == name]))
    for name in sorted({kernel.target for kernel in library}, reverse=True):
        title = f"CUDA C++ {cuda.compiler()}, {name}"
        parts.append(section(title, CUDA, [kernel for kernel in library if kernel.target == name]))
    given.out.write_text("\n".join(parts))
    if given.json:
        json.dump({"triton": [*map(asdict, kernels)], "cuda": [*map(asdict, library)]}, sys.stdout)


if __name__ == "__main__":
    main()
