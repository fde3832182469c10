"""Where and with what a run was made: hardware, versions, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import psutil
import torch

import partkernels
from partkernels import build_info

ROOT = Path(__file__).parents[1]


def machine(device: torch.device) -> dict[str, str | int | float]:
    """Names and values of the hardware."""
    facts = {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "memory [GiB]": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": gpu.name,
            "gpu memory [GiB]": round(gpu.total_memory / 2**30, 1),
            "gpu multiprocessors": gpu.multi_processor_count,
            "gpu L2 [MiB]": round(gpu.L2_cache_size / 2**20, 1),
        }
    return facts


def _processor() -> str:
    """As Linux names it; elsewhere as the platform does."""
    path = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)$", path.read_text(), re.MULTILINE) if path.exists() else None
    return found[1] if found else platform.processor()


def versions() -> dict[str, str]:
    """Names and versions of the software, and how the backends were built."""
    found = {
        "partkernels": partkernels.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton(),
    }
    # Whose dense operators ours are held against.
    for name, pattern in {"mkl": r"Math Kernel Library Version ([\d.]+)", "onednn": r"MKL-DNN v([\d.]+)"}.items():
        if match := re.search(pattern, torch.__config__.show()):
            found[name] = match.group(1)
    if torch.version.cuda:
        found |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    return found | {f"built with {name}": str(value) for name, value in build_info.facts().items()}


def _triton() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def commit() -> tuple[str, bool]:
    """The commit of this checkout, 'unknown' if it is none, and whether files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        return git("rev-parse", "HEAD") or "unknown", bool(git("status", "--porcelain", "--untracked-files=no"))
    except FileNotFoundError:  # no git on this machine
        return "unknown", False
