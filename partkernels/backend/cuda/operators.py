"""The CUDA C++ backend, csrc/cuda. Its `linear` rebuilds a subnetwork's weight as it multiplies, on tensor cores.

PyTorch computes everything else from a rebuilt weight: float32 and float64, gradients, convolutions, and linear layers
with so many rows that rebuilding the weight costs less than the fused kernel's overhead over cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from partkernels.backend import dispatch, plan, rebuilt
from partkernels.backend.bias import live_bias
from partkernels.backend.reference.bias import grad_bias
from partkernels.backend.reference.entries import (
    combine_rows,
    exchange_entries,
    gather_entries,
    scatter_entries,
)
from partkernels.backend.reference.linear import empty_linear

try:
    from partkernels.backend.triton.exchange import prepared
    from partkernels.backend.triton.optimizers import adam_steps, counted_adam_steps, sgd_steps
except ImportError:  # without Triton each tensor has launches of its own
    from partkernels.backend.reference.optimizers import adam_steps, counted_adam_steps, sgd_steps

    prepared = None

__all__ = [
    "adam_steps", "combine_rows", "conv2d", "conv2d_grad_input", "conv2d_grad_weight", "counted_adam_steps",
    "exchange_entries", "gather_entries", "grad_bias", "linear", "linear_grad_input", "linear_grad_weight",
    "scatter_entries", "sgd_steps",
]  # fmt: skip

_cuda = torch.ops.partkernels_cuda

# The fused product's overhead over the dense one on compute capability 9.0, as a fraction, by kind of defaults. 'zeros'
# and 'uniform' are measured on an H200 at 4096 and 8192 rows (benchmarks/results/h200.md). The others are predicted by
# the instructions of compiled loops, scaled by the error of these two.
_FUSED_OVERHEAD = {"zeros": 0.23, "uniform": 0.6, "normal": 2.0, "stored": 0.8}
# Rows of x up to which every GPU has a fused kernel.
_FEW_ROWS = 16
# Entries in 16 bytes.
_PART = 8


def __getattr__(name: str) -> Callable[..., Any]:
    """Look up an operator of csrc/torch by name, when it is first used: the library is loaded by then."""
    operator = getattr(_cuda, name).default
    globals()[name] = operator
    return operator


def _is_fused(x: Tensor, weight: Tensor, stored: Tensor | None, kind: str) -> bool:
    """Return whether the fused kernel computes linear, and note why."""
    rows = prod(x.shape[:-1])
    if (obstacle := _obstacle(rows, x, weight, stored)) is not None:
        is_fused, reason = False, obstacle
    elif plan.forced() is not None:
        is_fused, reason = plan.forced() != "rebuild", "asked for"
    else:
        is_fused = _FUSED_OVERHEAD[kind] <= rebuilt.USES[kind] / max(1, rows)
        reason = f"estimated, not measured, for {rows} rows of x"
    dispatch.note_plan(f"fused ({reason})" if is_fused else f"rebuild, then cuBLAS ({reason})")
    return is_fused


@cache  # every product calls this
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def _obstacle(rows: int, x: Tensor, weight: Tensor, stored: Tensor | None) -> str | None:
    """Return why no fused kernel serves these operands, or None."""
    if weight.dtype not in (torch.float16, torch.bfloat16):
        return f"the fused kernels have no {str(weight.dtype).removeprefix('torch.')}"
    if x.shape[-1] % _PART or not all(_has_parts(each) for each in (weight, stored) if each is not None):
        return "rows do not begin at multiples of 16 bytes"
    if rows > _FEW_ROWS and not _is_hopper(x.device):
        return f"more than {_FEW_ROWS} rows of x need compute capability 9.0"
    if rows > _FEW_ROWS and weight.shape[0] % _PART:
        return f"more than {_FEW_ROWS} rows of x need a multiple of {_PART} outputs"
    return None


def _has_parts(matrix: Tensor) -> bool:
    """Return whether a matrix's rows do not overlap and consist of aligned parts of 16 bytes."""
    *outer, inner = matrix.stride()
    aligned = matrix.data_ptr() % 16 == 0 and all(s % _PART == 0 and s >= matrix.shape[-1] for s in outer)
    return aligned and inner == 1


def _rebuild_into(out: Tensor, weight: Tensor, active: int, *partition) -> None:
    _cuda.subnetwork_weight_out(out, weight, active, *partition)


def _keep(out: Tensor, grad: Tensor, first: int, last: int, map: Tensor, count: int) -> None:
    _cuda.subnetwork_weight_grad_out(out, grad, first, last, map, count)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, active: int, update: int | None, map: Tensor,
    stored: Tensor | None, count: int, kind: str, *draw: Any,
) -> Tensor:  # fmt: skip
    if active == count:
        return F.linear(x, weight, live_bias(bias, active))
    partition = map, stored, count, kind, *draw
    if _is_fused(x, weight, stored, kind):
        rows = x if _has_parts(x) else x.clone(memory_format=torch.contiguous_format)
        return _cuda.linear(rows, weight, bias, active, update, *partition)
    out = empty_linear(x, weight)
    return rebuilt.linear(_rebuild_into, out, x, weight, live_bias(bias, active), active, *partition)


def linear_grad_input(*arguments: Any) -> Tensor:
    return rebuilt.linear_grad_input(_rebuild_into, *arguments)


def linear_grad_weight(*arguments: Any) -> Tensor:
    return rebuilt.linear_grad_weight(_keep, *arguments)


def _subnetwork_weight(weight: Tensor, like: Tensor, *partition) -> Tensor:
    return _cuda.subnetwork_weight(weight, *partition)


def conv2d(*arguments: Any) -> Tensor:
    return rebuilt.conv2d(_subnetwork_weight, *arguments)


def conv2d_grad_input(*arguments: Any) -> Tensor:
    return rebuilt.conv2d_grad_input(_subnetwork_weight, *arguments)


def conv2d_grad_weight(*arguments: Any) -> Tensor:
    return rebuilt.conv2d_grad_weight(_keep, *arguments)
