"""Facts about a run: hardware, versions, commit, and measured peak rates of the hardware.

torch.utils.collect_env reports more than a table can hold, and takes seconds.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import psutil
import torch

import partkernels
from partbench.measuring.clock import EventClock, WallClock
from partkernels import build_info

ROOT = Path(partkernels.__file__).parents[1]


def machine(device: torch.device) -> dict[str, str | int | float]:
    """Return names and values of the hardware's properties."""
    path = Path("/proc/cpuinfo")  # names the processor on Linux; elsewhere, platform does
    found = re.search(r"^model name\s*: (.*)$", path.read_text(), re.MULTILINE) if path.exists() else None
    facts = {
        "processor": found[1] if found else platform.processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "memory [GiB]": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        facts |= {"gpu": gpu.name, "gpu memory [GiB]": round(gpu.total_memory / 2**30, 1)}
        facts |= {"gpu multiprocessors": gpu.multi_processor_count, "gpu L2 [MiB]": round(gpu.L2_cache_size / 2**20, 1)}
    return facts


def versions() -> dict[str, str]:
    """Return names and versions of the software, and how the backends were built."""
    found = {"partkernels": partkernels.__version__, "python": platform.python_version(), "torch": torch.__version__}
    try:
        found["triton"] = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        found["triton"] = "none"
    # Libraries of the dense operators that ours are compared with.
    for name, pattern in {"mkl": r"Math Kernel Library Version ([\d.]+)", "onednn": r"MKL-DNN v([\d.]+)"}.items():
        if match := re.search(pattern, torch.__config__.show()):
            found[name] = match.group(1)
    if torch.version.cuda:
        found |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    return found | {f"built with {name}": str(value) for name, value in build_info.facts().items()}


def commit() -> tuple[str, bool]:
    """Return the commit of partkernels' checkout, or 'unknown' without one, and whether files differ from it.

    Committed results do not count, because a run rewrites them.
    """
    if not (ROOT / "csrc").is_dir():  # installed: a surrounding repository is another project's
        return "unknown", False

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
        return git("rev-parse", "HEAD") or "unknown", bool(changed)
    except FileNotFoundError:  # no git on this machine
        return "unknown", False


def rooflines(
    device: torch.device, dtypes: Sequence[torch.dtype], clock: WallClock | EventClock, *, scale: float = 1.0
) -> dict[str, float]:
    """Measure 'copy' in bytes a second, read and written; 'matmul float32' etc. in floating-point operations a second.

    Args:
        device, dtypes: of the products.
        clock: the clock that also times the suites.
        scale: factor of the sizes; below 1 for a dry run.
    """

    def seconds(call) -> float:
        call = clock.prepare(call)
        return median(clock.round([(call, clock.calls(call))] * 7))

    is_gpu = device.type == "cuda"
    bytes = int((2**31 if is_gpu else 2**28) * scale)
    source = torch.empty(bytes // 4, device=device).uniform_()
    # Copies by arithmetic: a plain copy took half as long again on an H200.
    found = {"copy": 2 * bytes / seconds(partial(torch.neg, source, out=torch.empty_like(source)))}
    size = max(16, int((8192 if is_gpu else 2048) * scale))
    for dtype in dtypes:
        # Random, because products of zeros draw less power and run faster.
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        found[f"matmul {str(dtype).removeprefix('torch.')}"] = 2 * size**3 / seconds(partial(torch.mm, a, b))
    return found
