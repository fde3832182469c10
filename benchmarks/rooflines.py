"""Rooflines: the memory bandwidth and the arithmetic rates that this device reaches, measured, not from a datasheet."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

import torch

from benchmarks.clock import Call, EventClock, WallClock


def rooflines(
    device: torch.device, dtypes: Sequence[torch.dtype], clock: WallClock | EventClock, *, scale: float = 1.0
) -> dict[str, float]:
    """'copy' in bytes a second, read and written; 'matmul float32' and so on in floating-point operations a second.

    Args:
        device, dtypes: of the products.
        clock: also the one that times the suites.
        scale: of the sizes; below 1 for a dry run.
    """
    is_gpu = device.type == "cuda"
    bytes = int((2**31 if is_gpu else 2**28) * scale)
    source = torch.empty(bytes, dtype=torch.uint8, device=device).random_()
    found = {"copy": 2 * bytes / _seconds(partial(torch.empty_like(source).copy_, source), clock)}
    size = max(16, int((8192 if is_gpu else 2048) * scale))
    for dtype in dtypes:
        # Random, for products of zeros draw less power and run faster.
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        found[f"matmul {str(dtype).removeprefix('torch.')}"] = 2 * size**3 / _seconds(partial(torch.mm, a, b), clock)
    return found


def _seconds(call: Call, clock: WallClock | EventClock) -> float:
    call = clock.prepare(call)
    count = clock.calls(call)
    return median(clock.round([(call, count)] * 7))
