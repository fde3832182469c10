"""What every launch shares: the tensor's own GPU, rows of any strides, and a partition as a kernel's arguments."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from partkernels.arguments import bits_for
from partkernels.backend.triton.packed_map import threshold
from partkernels.formats.philox import GROUP, split

# TRITON_INTERPRET=1: kernels run on the CPU, an operation at a time. Triton decides it as it reads a kernel.
INTERPRETED: bool = triton.knobs.runtime.interpret
# Inline assembly is PTX; elsewhere its twin in plain Triton runs.
ASM = torch.version.hip is None and not INTERPRETED
# Entries beyond a tensor's last that a program may still count, of its tile.
_BEYOND = 1024
# Words of a partition's draws and of its threshold: specialising them would compile a kernel again for every seed.
# So it is with rows of x, ids and partitions, which kernels name beside them.
WORDS = (
    "low", "addend", "below", "step", "seed_low", "seed_high", "stream_low", "stream_high", "first_row", "first_group"
)  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """What the choice of a configuration depends on; shared_memory is a block's, in bytes."""

    name: str
    multiprocessors: int
    shared_memory: int
    is_hopper: bool


@cache
def gpu(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return Gpu("interpreter", multiprocessors=2, shared_memory=227 << 10, is_hopper=True)
    properties = torch.cuda.get_device_properties(device)
    # ROCm's has no figure for more than the default.
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
    is_hopper = torch.version.hip is None and properties.major == 9
    return Gpu(properties.name, properties.multi_processor_count, shared, is_hopper)


def on(tensor: Tensor) -> AbstractContextManager:
    """Launches go to the current device: makes it the tensor's."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return nullcontext()


def index_type(*spans: int) -> tl.dtype:
    """The type of offsets that reach so far, and of what is counted so far."""
    return tl.int64 if max(spans) + _BEYOND >= 1 << 31 else tl.int32


def strides_of(**tensors: Tensor) -> dict[str, int]:
    """Strides as a kernel's arguments: of x x0, x1, ..."""
    return {f"{name}{i}": stride for name, tensor in tensors.items() for i, stride in enumerate(tensor.stride())}


def rows_of(x: Tensor) -> tuple[Tensor, int, dict[str, int]]:
    """x [..., cols] as rows: x itself, how many rows, and where they lie.

    Row m is at m // inner * outer_stride + m % inner * inner_stride. That serves any x of up to three dimensions, and
    of more where they merge; what doesn't is copied, as torch's own matmul copies it.
    """
    merged: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = merged[-1][0] * size, stride
        else:
            merged.append((size, stride))
    if len(merged) > 2:
        return rows_of(x.contiguous())
    outer, inner = merged if len(merged) == 2 else (*merged, (1, 0), (1, 0))[:2]
    strides = {"inner": inner[0], "outer_stride": outer[1], "inner_stride": inner[1]}
    return x, prod(x.shape[:-1]), strides


@cache
def _words(
    bits: int, active: int, kind: str, step: float, seed: int, stream: int, row: int, col: int
) -> dict[str, int]:
    # A draw's step: for uniform ones a bfloat16 number, twice; for normal ones a float32.
    step_bits = torch.tensor(step, dtype=torch.float32, device="cpu").view(torch.int32).item()
    if kind == "uniform":
        step_bits |= step_bits >> 16
    words = *threshold(bits, active), step_bits, *split(seed), *split(stream), row, col // GROUP
    return dict(zip(WORDS, words, strict=True))


def subnetwork(active: int, map: Tensor, stored: Tensor | None, count: int, kind: str, *draw) -> dict:
    """The arguments of a kernel that rebuilds the weight of subnetwork `active`, fewer than all partitions."""
    bits = bits_for(count)
    words = _words(bits, active, kind, *draw)
    lies = {"map": map, "map_stride": map.stride(0), "row_bytes": map.shape[1]}
    return {**lies, **words, "BITS": bits, "KIND": kind, "ASM": ASM}
