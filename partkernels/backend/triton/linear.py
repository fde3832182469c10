"""linear: the subnetwork's weight is rebuilt tile by tile in registers, as it is needed.

The product is y^T = W x^T, so that the tile is the left operand, which Hopper's tensor cores can read from registers.
Gradients are computed by PyTorch's kernels from a rebuilt weight.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from partkernels.arguments import bits_for
from partkernels.backend import rebuilt
from partkernels.backend.bias import live_bias
from partkernels.backend.reference.linear import empty_linear
from partkernels.backend.triton import launch, plans
from partkernels.backend.triton.arithmetic import add_product
from partkernels.backend.triton.plans import Config, Product
from partkernels.backend.triton.rebuild import GROUP, rebuild
from partkernels.backend.triton.subnetwork_weight import keep, rebuild_into
from partkernels.backend.triton.tiles import compute, store_tile, tile_of


@triton.jit
def _row_offsets(row, inner, outer_stride, inner_stride):
    """Return the offsets of rows of x (see launch.rows_of)."""
    row = row.to(tl.int64)
    return row // inner * outer_stride + row % inner * inner_stride


@triton.jit(do_not_specialize=("M", "steps", *launch.WORDS))
def forward_kernel(
    x, weight, stored, bias, out, map,
    M, N, K, steps, inner, outer_stride, inner_stride, x_col, weight_row, weight_col, stored_row, stored_col,
    map_stride, row_bytes,
    low: tl.uint32, addend: tl.uint32, below: tl.uint32, step: tl.uint32,
    seed_low: tl.uint32, seed_high: tl.uint32, stream_low: tl.uint32, stream_high: tl.uint32,
    first_row: tl.uint32, first_group: tl.uint32,
    BITS: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr, EVEN: tl.constexpr, INDEX: tl.constexpr,
    PRECISION: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Compute out [M, N] = x w_k^T + bias, with tiles [n, m]; each program of axis 1 sums `steps` column groups."""
    n0, m0 = tile_of(tl.program_id(0), N, M, INDEX, DOWN, ACROSS)
    # Rows beyond the last repeat the last one; their results are not stored.
    row = tl.minimum(n0 + tl.arange(0, DOWN), N - 1).to(tl.int64)[:, None]
    # Without clamping, the compiler recomputes this where it is needed; a clamped row was kept, in 17 more registers.
    drawn_row = (n0 + first_row + tl.arange(0, DOWN))[:, None]
    x_row = tl.minimum(m0 + tl.arange(0, ACROSS), M - 1)
    column = tl.arange(0, GROUP)
    wide_column = column.to(tl.int64)
    weight_at = row * weight_row + wide_column[None, :] * weight_col
    stored_at = row * stored_row + wide_column[None, :] * stored_col
    x_at = _row_offsets(x_row, inner, outer_stride, inner_stride)[None, :] + wide_column[:, None] * x_col
    map += row[:, :, None] * map_stride

    first = tl.program_id(1) * steps
    last = tl.minimum(first + steps, tl.cdiv(tl.cast(K, INDEX), GROUP))
    start = first.to(tl.int64) * GROUP
    x += start * x_col
    weight += start * weight_col
    stored += start * stored_col
    total = tl.zeros((DOWN, ACROSS), tl.float32)
    for i in range(tl.maximum(last - first, 1)):
        k = tl.cast(i, INDEX) * GROUP
        inside = k + start + column < K
        w_tile = tl.load(weight + k * weight_col + weight_at, None if EVEN else inside[None, :], None if EVEN else 0)
        stored_tile = w_tile
        if KIND == "stored":
            stored_tile = tl.load(stored + k * stored_col + stored_at, None if EVEN else inside[None, :])
        x_tile = tl.load(x + k * x_col + x_at, None if EVEN else inside[:, None], None if EVEN else 0)
        w_tile = rebuild(
            w_tile, stored_tile, map, drawn_row, first + i, row_bytes, low, addend, below,
            step, seed_low, seed_high, stream_low, stream_high, first_group, BITS, KIND, EVEN, ASM,
        )  # fmt: skip
        total = add_product(total, w_tile, x_tile, PRECISION)
    n = n0 + tl.arange(0, DOWN)
    m = m0 + tl.arange(0, ACROSS)
    store_tile(total, bias, out, n, m, N, M, n, m.to(tl.int64) * N, tl.cast(M, tl.int64) * N)


def _strides(weight: Tensor, stored: Tensor) -> dict[str, int]:
    both = (("weight", weight), ("stored", stored))
    return {f"{name}_{along}": t.stride(i) for name, t in both for i, along in enumerate(("row", "col"))}


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, active: int, update: int | None, map: Tensor,
    stored: Tensor | None, count: int, kind: str, *draw: Any,
) -> Tensor:  # fmt: skip
    bias = live_bias(bias, active)
    if active == count:
        return F.linear(x, weight, bias)
    out = empty_linear(x, weight)
    if out.numel() == 0:
        return out
    n, k = weight.shape
    partition = map, stored, count, kind, *draw
    rows, m, row_strides = launch.rows_of(x)
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    product = Product(n, m, k, x.dtype, bits_for(count), kind, tf32, launch.gpu(x.device))

    def fused(config: Config) -> Tensor:
        default = weight if stored is None else stored
        row = None if bias is None else bias.contiguous()  # the kernel has no stride of it
        return compute(
            out, forward_kernel, product, config, x=rows, weight=weight, stored=default, bias=row, M=m, N=n, K=k,
            **row_strides, x_col=rows.stride(-1), **_strides(weight, default), EVEN=k % GROUP.value == 0,
            INDEX=launch.index_type(m, n, k, *(k * t.stride(-1) for t in (rows, weight, default))),
            **launch.subnetwork(active, *partition),
        )  # fmt: skip

    return plans.run(product, fused, lambda: rebuilt.linear(rebuild_into, out, x, weight, bias, active, *partition))


def linear_grad_input(*arguments: Any) -> Tensor:
    return rebuilt.linear_grad_input(rebuild_into, *arguments)


def linear_grad_weight(*arguments: Any) -> Tensor:
    return rebuilt.linear_grad_weight(keep, *arguments)
