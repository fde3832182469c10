"""The Triton backend: fused kernels for any GPU that Triton compiles for.

Under TRITON_INTERPRET=1 all kernels run on the CPU, slowly, which allows tests without a GPU.
"""

import importlib.util
import os
from functools import cache

import torch

from partkernels.backend.description import READY, Backend

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@cache
def status() -> str:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    if INTERPRETED:
        return READY
    if not torch.cuda.is_available():
        return "no GPU, or PyTorch was built without CUDA; on a CPU, TRITON_INTERPRET=1 runs the kernels slowly"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return f"{torch.cuda.get_device_name()} is older than compute capability 8.0: use the reference backend"
    return READY


BACKEND = Backend(
    "triton",
    status,
    rank=2,
    devices=frozenset({"cpu" if INTERPRETED else "cuda"}),
    dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
    automatic=not INTERPRETED,
    makes_defaults=not INTERPRETED,
    planned=frozenset({"forward"}),
)
