"""Shared parts of every launch: the tensor's GPU, rows with any strides, and a partition as kernel arguments."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from partkernels.arguments import bits_for
from partkernels.backend.triton.packed_map import threshold
from partkernels.formats.philox import GROUP, split

# With TRITON_INTERPRET=1, kernels run on the CPU, one operation at a time. Triton reads it when a kernel is defined.
INTERPRETED: bool = triton.knobs.runtime.interpret
# Inline assembly is PTX; elsewhere an equivalent in plain Triton runs.
ASM = torch.version.hip is None and not INTERPRETED
# Limit on the indices of a program's tile beyond the last entry of a tensor.
_BEYOND = 1024
# Words of a partition's draws and threshold: specialising on them would compile a kernel again for every seed. Kernels
# list their rows of x, ids and partitions beside them for the same reason.
WORDS = (
    "low", "addend", "below", "step", "seed_low", "seed_high", "stream_low", "stream_high", "first_row", "first_group"
)  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU by which a kernel's tile is chosen.

    Attributes:
        name: PyTorch's name of the device, or "interpreter".
        multiprocessors: their number.
        shared_memory: bytes that a block may use.
        is_hopper: whether it is an NVIDIA GPU of compute capability 9, whose tensor cores multiply by `wgmma`.
    """

    name: str
    multiprocessors: int
    shared_memory: int
    is_hopper: bool


@cache
def gpu(device: torch.device) -> Gpu:
    """Return the properties of a device; for Triton's interpreter, which runs on a CPU, those of a small Hopper GPU."""
    if device.type != "cuda":
        return Gpu("interpreter", multiprocessors=2, shared_memory=227 << 10, is_hopper=True)
    properties = torch.cuda.get_device_properties(device)
    # ROCm reports the default limit only.
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
    is_hopper = torch.version.hip is None and properties.major == 9
    return Gpu(properties.name, properties.multi_processor_count, shared, is_hopper)


def on(tensor: Tensor) -> AbstractContextManager[None]:
    """Make the tensor's device the current one, to which launches go."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return nullcontext()


def place(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key of the memory in which numbers for launches with this tensor are kept: its device and stream.

    While a CUDA graph is captured, the key is another at each call: the graph must copy its numbers whenever it is
    replayed.
    """
    if not tensor.is_cuda:
        return (tensor.device,)
    stream = torch.cuda.current_stream(tensor.device).cuda_stream
    return tensor.device, stream, object() if torch.cuda.is_current_stream_capturing() else None


def to_gpu(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a new tensor of the CPU to a device without waiting for it."""
    if device.type != "cuda":
        return tensor.to(device)
    pinned = tensor.pin_memory()
    if torch.cuda.is_current_stream_capturing():
        _captured.append(pinned)
    return pinned.to(device, non_blocking=True)


# Memory that CUDA graphs copy from whenever they are replayed.
_captured: list[Tensor] = []


def index_type(*spans: int) -> tl.dtype:
    """Return the dtype for offsets and counts up to the largest of these spans."""
    return tl.int64 if max(spans) + _BEYOND >= 1 << 31 else tl.int32


def strides_of(**tensors: Tensor) -> dict[str, int]:
    """Return strides as kernel arguments, named x0, x1, ... for x."""
    return {f"{name}{i}": stride for name, tensor in tensors.items() for i, stride in enumerate(tensor.stride())}


def rows_of(x: Tensor) -> tuple[Tensor, int, dict[str, int]]:
    """View x [..., cols] as rows: return x, the number of rows, and their strides.

    Row m is at m // inner * outer_stride + m % inner * inner_stride. This covers any x of up to three dimensions, and
    of more if they merge; any other x is copied, as torch's matmul does.
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
    # The step of a draw is a bfloat16 number, twice, for uniform defaults, and a float32 for normal ones.
    step_bits = torch.tensor(step, dtype=torch.float32, device="cpu").view(torch.int32).item()
    if kind == "uniform":
        step_bits |= step_bits >> 16
    words = *threshold(bits, active), step_bits, *split(seed), *split(stream), row, col // GROUP
    return dict(zip(WORDS, words, strict=True))


def subnetwork(active: int, map: Tensor, stored: Tensor | None, count: int, kind: str, *draw: Any) -> dict[str, Any]:
    """Return the arguments of a kernel that rebuilds subnetwork `active`, which is not the last one."""
    bits = bits_for(count)
    words = _words(bits, active, kind, *draw)
    lies = {"map": map, "map_stride": map.stride(0), "row_bytes": map.shape[1]}
    return {**lies, **words, "BITS": bits, "KIND": kind, "ASM": ASM}
