"""Products with dense weights, without a partition, by PyTorch or, where faster on a CPU, by csrc/cpu."""

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
# MKL does not use AVX-512 on AMD processors. Time relative to PyTorch for 256 x 1024 x 1024 on one core: on Zen 5,
# float32 0.50, float64 0.64, bfloat16 1.09; on Zen 4, which splits 512-bit vectors into halves, float32 1.09.
DTYPES = (torch.float32, torch.float64)
# The family number that AMD's Zen 5 processors report.
ZEN_5 = 26
# The operator arguments after the map, for a partition that is entirely active.
WHOLE = (None, 1, "zeros", 0.0, 0, 0, 0, 0)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute F.linear; differentiable."""
    if not uses_cpp(x, weight):
        return F.linear(x, weight, bias)
    return calls["linear"](x, weight, bias, 1, 1, _map(*weight.shape), *WHOLE, dispatch.requested())


def linear_grad_input(grad_output: Tensor, weight: Tensor) -> Tensor:
    """Return grad_output W, the gradient of F.linear's input."""
    if not uses_cpp(grad_output, weight):
        return grad_output @ weight
    return calls["linear_grad_input"](grad_output, weight, 1, 1, _map(*weight.shape), *WHOLE, dispatch.requested())


def linear_grad_weight(grad_output: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return grad_output^T x over all positions, F.linear's weight gradient; in `out`, of any strides, if given."""
    if not uses_cpp(x, grad_output):
        return torch.mm(grad_output.reshape(-1, grad_output.shape[-1]).t(), x.reshape(-1, x.shape[-1]), out=out)
    shape = grad_output.shape[-1], x.shape[-1]
    found = calls["linear_grad_weight"](grad_output, x, 1, _map(*shape), 1, dispatch.requested())
    return found if out is None else out.copy_(found)


def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair, groups: int = 1
) -> Tensor:
    """Compute F.conv2d, differentiable; on a CPU it avoids the failures of PyTorch's listed in docs/torch-faults.md."""
    geometry = stride, padding, dilation, groups
    if not _is_cpus(x, weight):
        return F.conv2d(x, weight, bias, *geometry)
    return calls["conv2d"](x, weight, bias, *geometry, 1, 1, _map_of(weight.shape), *WHOLE, dispatch.requested())


def conv2d_grad_input(
    grad_output: Tensor, weight: Tensor, size: Sequence[int], stride: Pair, padding: Pair, dilation: Pair,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    """Return the gradient of conv2d's input of this size: the transposed convolution of grad_output."""
    geometry = stride, padding, dilation, groups
    if not _is_cpus(grad_output, weight):
        return torch.nn.grad.conv2d_input(size, weight, grad_output, *geometry)
    whole = _map_of(weight.shape), *WHOLE
    return calls["conv2d_grad_input"](grad_output, weight, size, *geometry, 1, 1, *whole, dispatch.requested())


def conv2d_grad_weight(
    grad_output: Tensor, x: Tensor, kernel_size: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: int = 1
) -> Tensor:
    """Return the gradient with respect to conv2d's weight, [out_channels, in_channels / groups, *kernel_size].

    Args:
        grad_output: the gradient with respect to conv2d's output.
        x: conv2d's input.
        kernel_size: height and width; the other arguments are those of conv2d.
    """
    geometry, shape = (stride, padding, dilation, groups), (grad_output.shape[1], x.shape[1] // groups, *kernel_size)
    if not _is_cpus(grad_output, x):
        return torch.nn.grad.conv2d_weight(x, shape, grad_output, *geometry)
    map = _map_of(shape)
    return calls["conv2d_grad_weight"](grad_output, x, kernel_size, *geometry, 1, map, 1, dispatch.requested())


def uses_cpp(x: Tensor, other: Tensor) -> bool:
    """Return whether dense products of these tensors run in csrc/cpu, which is faster than PyTorch for them.

    They must be float32 or float64 on an AMD processor from Zen 5 on, and not be compiled or on another backend.
    """
    return x.dtype in DTYPES and _is_cpus(x, other) and _is_faster()


def _is_cpus(x: Tensor, other: Tensor) -> bool:
    """Return whether the cpu backend serves both tensors."""
    if x.device.type != "cpu" or x.dtype != other.dtype or dispatch.requested() not in ("auto", "cpu"):
        return False
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:  # which our operators do not differentiate
        return False
    return dispatch.BACKENDS["cpu"].obstacle("cpu", x.dtype) is None


@cache
def _is_faster() -> bool:
    """Return whether MKL uses only half of this processor's vector width."""
    facts = Path("/proc/cpuinfo")  # on Linux only; on other systems False
    return facts.exists() and leaves_half_unused(facts.read_text(errors="replace"))


def leaves_half_unused(cpuinfo: str) -> bool:
    r"""Return whether MKL leaves half of the processor's vector width unused, by /proc/cpuinfo: AMD from Zen 5 on.

    Example:
        >>> leaves_half_unused("vendor_id : AuthenticAMD\ncpu family : 25\nflags : avx2 avx512f")
        False
    """
    family = re.search(r"cpu family\s*: (\d+)", cpuinfo)
    is_whole = family is not None and int(family[1]) >= ZEN_5  # processes 512-bit vectors at once
    return is_whole and "AuthenticAMD" in cpuinfo and "avx512f" in cpuinfo


def _map_of(shape: Sequence[int]) -> Tensor:
    return _map(*matrix_shape(tuple(shape)))


def _map(rows: int, cols: int) -> Tensor:
    """Return the map of a dense weight, as one row expanded; its values are not read."""
    width = row_bytes(cols, bits_for(1))
    return torch.zeros(1, width, dtype=torch.uint8, device="cpu").expand(rows, -1)
