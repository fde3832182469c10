"""Products with whole weights, without a partition, by PyTorch or, where it is better on a CPU, by csrc/cpu."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from partkernels.arguments import bits_for, matrix_shape, row_bytes
from partkernels.backend import dispatch
from partkernels.operators.registration import calls

Pair = Sequence[int]
# MKL leaves AVX-512 of AMD's processors unused. For 256 x 1024 x 1024, one core, time over PyTorch's: of Zen 5, float32
# 0.50, float64 0.64, bfloat16 1.09; of Zen 4, which halves vectors of 512 bits, float32 1.09.
DTYPES = (torch.float32, torch.float64)
# The family of AMD's processors, as they tell it.
ZEN_5 = 26
# A partition of which all entries are live, after its map.
WHOLE = (None, 1, "zeros", 0.0, 0, 0, 0, 0)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, differentiable."""
    if not is_ours(x, weight):
        return F.linear(x, weight, bias)
    return calls["linear"](x, weight, bias, 1, 1, _map(*weight.shape), *WHOLE, dispatch.requested())


def linear_grad_input(grad_output: Tensor, weight: Tensor) -> Tensor:
    """grad_output W: the gradient of F.linear's input."""
    if not is_ours(grad_output, weight):
        return grad_output @ weight
    return calls["linear_grad_input"](grad_output, weight, 1, 1, _map(*weight.shape), *WHOLE, dispatch.requested())


def linear_grad_weight(grad_output: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """grad_output^T x of all positions: the gradient of F.linear's weight; into `out`, of any strides, if given."""
    if not is_ours(x, grad_output):
        return torch.mm(grad_output.reshape(-1, grad_output.shape[-1]).t(), x.reshape(-1, x.shape[-1]), out=out)
    shape = grad_output.shape[-1], x.shape[-1]
    found = calls["linear_grad_weight"](grad_output, x, 1, _map(*shape), 1, dispatch.requested())
    return found if out is None else out.copy_(found)


def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair, groups: int = 1
) -> Tensor:
    """F.conv2d, differentiable; on a CPU not PyTorch's own where that fails, as docs/torch-faults.md has it."""
    geometry = stride, padding, dilation, groups
    if not _is_cpus(x, weight):
        return F.conv2d(x, weight, bias, *geometry)
    return calls["conv2d"](x, weight, bias, *geometry, 1, 1, _map_of(weight.shape), *WHOLE, dispatch.requested())


def conv2d_grad_input(
    grad_output: Tensor, weight: Tensor, size: Sequence[int], stride: Pair, padding: Pair, dilation: Pair,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    """The gradient of conv2d's input of this size: the transposed convolution of grad_output."""
    geometry = stride, padding, dilation, groups
    if not _is_cpus(grad_output, weight):
        return torch.nn.grad.conv2d_input(size, weight, grad_output, *geometry)
    whole = _map_of(weight.shape), *WHOLE
    return calls["conv2d_grad_input"](grad_output, weight, size, *geometry, 1, 1, *whole, dispatch.requested())


def conv2d_grad_weight(
    grad_output: Tensor, x: Tensor, kernel_size: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: int = 1
) -> Tensor:
    """The gradient of conv2d's weight."""
    geometry, shape = (stride, padding, dilation, groups), (grad_output.shape[1], x.shape[1] // groups, *kernel_size)
    if not _is_cpus(grad_output, x):
        return torch.nn.grad.conv2d_weight(x, shape, grad_output, *geometry)
    map = _map_of(shape)
    return calls["conv2d_grad_weight"](grad_output, x, kernel_size, *geometry, 1, map, 1, dispatch.requested())


def is_ours(x: Tensor, other: Tensor) -> bool:
    """Whether products of these are csrc/cpu's."""
    return x.dtype in DTYPES and _is_cpus(x, other) and _is_faster()


def _is_cpus(x: Tensor, other: Tensor) -> bool:
    """Whether the cpu backend serves both."""
    if x.device.type != "cpu" or x.dtype != other.dtype or dispatch.requested() not in ("auto", "cpu"):
        return False
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:  # which our operators don't differentiate
        return False
    return dispatch.BACKENDS["cpu"].obstacle("cpu", x.dtype) is None


@cache
def _is_faster() -> bool:
    """Whether the processor is one of which MKL leaves a half unused."""
    facts = Path("/proc/cpuinfo")  # of Linux; of others nothing is known
    return facts.exists() and leaves_half_unused(facts.read_text(errors="replace"))


def leaves_half_unused(cpuinfo: str) -> bool:
    """Whether MKL leaves a half of this processor unused, of which Linux tells so: AMD's from Zen 5 on.

    Example:
        >>> leaves_half_unused("vendor_id : AuthenticAMD\\ncpu family : 25\\nflags : avx2 avx512f")
        False
    """
    family = re.search(r"cpu family\s*: (\d+)", cpuinfo)
    is_whole = family is not None and int(family[1]) >= ZEN_5  # a vector of 512 bits at once
    return is_whole and "AuthenticAMD" in cpuinfo and "avx512f" in cpuinfo


def _map_of(shape: Sequence[int]) -> Tensor:
    return _map(*matrix_shape(tuple(shape)))


def _map(rows: int, cols: int) -> Tensor:
    """The map of a whole weight: nothing is read of it, nor kept in memory."""
    width = row_bytes(cols, bits_for(1))
    return torch.zeros(1, width, dtype=torch.uint8, device="cpu").expand(rows, -1)
