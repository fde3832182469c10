"""linear: products with a subnetwork's weight that is rebuilt tile by tile, each tile in registers as it is needed.

In the forward the tile is the left operand, y^T = W x^T: on Hopper a tensor core takes that one from registers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from partkernels.arguments import bits_for
from partkernels.backend import rebuilt
from partkernels.backend.bias import live_bias
from partkernels.backend.reference.linear import empty_linear, empty_linear_grad_input, empty_linear_grad_weight
from partkernels.backend.triton import launch, plans
from partkernels.backend.triton.arithmetic import add_product
from partkernels.backend.triton.packed_map import tile_ids
from partkernels.backend.triton.plans import Config, Product
from partkernels.backend.triton.rebuild import GROUP, rebuild
from partkernels.backend.triton.subnetwork_weight import keep, rebuild_into
from partkernels.backend.triton.tiles import compute, store_tile, tile_of


@triton.jit
def _row_offsets(row, inner, outer_stride, inner_stride):
    """Where the rows of x lie (see launch.rows_of)."""
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
    """out [M, N] = x w_k^T + bias; each program of axis 1 sums `steps` groups of columns. Tiles are [n, m]."""
    n0, m0 = tile_of(tl.program_id(0), N, M, INDEX, DOWN, ACROSS)
    # Rows beyond the last are the last again: what comes of them is not stored.
    row = tl.minimum(n0 + tl.arange(0, DOWN), N - 1).to(tl.int64)[:, None]
    # A chain as short as this is computed where it is needed; a clamped one was kept, and took 17 registers more.
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


@triton.jit(do_not_specialize=("M", "steps", *launch.WORDS))
def grad_input_kernel(
    grad, weight, stored, out, map,
    M, N, K, steps, inner, outer_stride, inner_stride, grad_col, weight_row, weight_col, stored_row, stored_col,
    map_stride, row_bytes,
    low: tl.uint32, addend: tl.uint32, below: tl.uint32, step: tl.uint32,
    seed_low: tl.uint32, seed_high: tl.uint32, stream_low: tl.uint32, stream_high: tl.uint32,
    first_row: tl.uint32, first_group: tl.uint32,
    BITS: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr, EVEN: tl.constexpr, INDEX: tl.constexpr,
    PRECISION: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """out [M, K] = grad w_k; each program of axis 1 sums `steps` times 64 rows of the weight. Tiles are [m, k]."""
    m0, k0 = tile_of(tl.program_id(0), M, K, INDEX, DOWN, ACROSS)
    grad_row = tl.minimum(m0 + tl.arange(0, DOWN), M - 1)
    column = k0 + tl.arange(0, ACROSS)
    row = tl.arange(0, GROUP)
    wide_row = row.to(tl.int64)
    grad_at = _row_offsets(grad_row, inner, outer_stride, inner_stride)[:, None] + wide_row[None, :] * grad_col
    weight_at = wide_row[:, None] * weight_row + column.to(tl.int64)[None, :] * weight_col
    stored_at = wide_row[:, None] * stored_row + column.to(tl.int64)[None, :] * stored_col
    map_at = wide_row[:, None, None] * map_stride

    first = tl.program_id(1) * steps
    last = tl.minimum(first + steps, tl.cdiv(tl.cast(N, INDEX), GROUP))
    total = tl.zeros((DOWN, ACROSS), tl.float32)
    for i in range(tl.maximum(last - first, 1)):
        n = tl.cast(first + i, INDEX) * GROUP
        inside = n + row < N
        within = inside[:, None] & (column < K)[None, :]
        grad_tile = tl.load(grad + n * grad_col + grad_at, None if EVEN else inside[None, :], None if EVEN else 0)
        w_tile = tl.load(weight + n * weight_row + weight_at, None if EVEN else within, None if EVEN else 0)
        stored_tile = w_tile
        if KIND == "stored":
            stored_tile = tl.load(stored + n * stored_row + stored_at, None if EVEN else within, None if EVEN else 0)
        # Rows beyond the last have the last's map: finite defaults, which meet a gradient of 0.
        map_rows = map + (
            n * map_stride + map_at if EVEN else tl.minimum(n + row, N - 1).to(tl.int64)[:, None, None] * map_stride
        )
        w_tile = rebuild(
            w_tile, stored_tile, map_rows, (n + first_row + row)[:, None], k0 // GROUP, row_bytes, low, addend, below,
            step, seed_low, seed_high, stream_low, stream_high, first_group, BITS, KIND, EVEN, ASM,
        )  # fmt: skip
        total = add_product(total, grad_tile, w_tile, PRECISION)
    m = m0 + tl.arange(0, DOWN)
    store_tile(total, None, out, m, column, M, K, m.to(tl.int64) * K, column, tl.cast(M, tl.int64) * K)


@triton.jit(do_not_specialize=("M", "steps", "update"))
def grad_weight_kernel(
    grad, x, out, map,
    M, N, K, steps, grad_inner, grad_outer_stride, grad_inner_stride, grad_col,
    inner, outer_stride, inner_stride, x_col, map_stride, update,
    BITS: tl.constexpr, EVEN: tl.constexpr, NESTED: tl.constexpr, INDEX: tl.constexpr,
    PRECISION: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """out [N, K] = grad^T x at the entries of partition update, 0 elsewhere. Tiles are [n, k].

    Each program of axis 1 sums `steps` times 64 rows of x. NESTED: some rows lie at two strides.
    """
    n0, k0 = tile_of(tl.program_id(0), N, K, INDEX, DOWN, ACROSS)
    n = n0 + tl.arange(0, DOWN)
    k = k0 + tl.arange(0, ACROSS)
    row = tl.arange(0, GROUP)
    first = tl.program_id(1) * steps
    last = tl.minimum(first + steps, tl.cdiv(tl.cast(M, INDEX), GROUP))
    n_at = n.to(tl.int64)[:, None] * grad_col
    k_at = k.to(tl.int64)[None, :] * x_col
    if not NESTED:
        n_at += row.to(tl.int64)[None, :] * grad_outer_stride
        k_at += row.to(tl.int64)[:, None] * outer_stride
    total = tl.zeros((DOWN, ACROSS), tl.float32)
    for i in range(tl.maximum(last - first, 1)):
        start = tl.cast(first + i, INDEX) * GROUP
        m = start + row
        if NESTED:
            grad_at = n_at + _row_offsets(m, grad_inner, grad_outer_stride, grad_inner_stride)[None, :]
            x_at = k_at + _row_offsets(m, inner, outer_stride, inner_stride)[:, None]
            grad_rows, x_rows = grad, x
        else:
            grad_at, x_at = n_at, k_at
            grad_rows, x_rows = grad + start * grad_outer_stride, x + start * outer_stride
        if EVEN:
            grad_tile = tl.load(grad_rows + grad_at)
            x_tile = tl.load(x_rows + x_at)
        else:
            grad_tile = tl.load(grad_rows + grad_at, (n < N)[:, None] & (m < M)[None, :], 0)
            x_tile = tl.load(x_rows + x_at, (m < M)[:, None] & (k < K)[None, :], 0)
        total = add_product(total, grad_tile, x_tile, PRECISION)
    owner = tile_ids(map, n[:, None], k0, N, K, map_stride, BITS, ACROSS)
    total = tl.where(owner == update - 1, total, 0)
    store_tile(total, None, out, n, k, N, K, n.to(tl.int64) * K, k, tl.cast(N, tl.int64) * K)


def _product(operator: str, down: int, across: int, depth: int, uses: int, x: Tensor, bits: int, kind: str) -> Product:
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return Product(operator, down, across, depth, uses, x.dtype, bits, kind, tf32, launch.gpu(x.device))


def _strides(weight: Tensor, stored: Tensor) -> dict[str, int]:
    both = (("weight", weight), ("stored", stored))
    return {f"{name}_{along}": t.stride(i) for name, t in both for i, along in enumerate(("row", "col"))}


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, active: int, update: int | None, map: Tensor,
    stored: Tensor | None, count: int, kind: str, *draw,
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
    product = _product("linear", n, m, k, m, x, bits_for(count), kind)

    def fused(config: Config) -> Tensor:
        default = weight if stored is None else stored
        return compute(
            out, forward_kernel, product, config, x=rows, weight=weight, stored=default, bias=bias, M=m, N=n, K=k,
            **row_strides, x_col=rows.stride(-1), **_strides(weight, default), EVEN=k % GROUP.value == 0,
            INDEX=launch.index_type(m, n, k, *(k * t.stride(-1) for t in (rows, weight, default))),
            **launch.subnetwork(active, *partition),
        )  # fmt: skip

    return plans.run(product, fused, lambda: rebuilt.linear(rebuild_into, out, x, weight, bias, active, *partition))


def linear_grad_input(
    grad_output: Tensor, weight: Tensor, active: int, update: int | None, map: Tensor, stored: Tensor | None,
    count: int, kind: str, *draw,
) -> Tensor:  # fmt: skip
    if active == count:
        return grad_output @ weight
    out = empty_linear_grad_input(grad_output, weight)
    if out.numel() == 0:
        return out
    n, k = weight.shape
    partition = map, stored, count, kind, *draw
    rows, m, row_strides = launch.rows_of(grad_output)
    product = _product("linear_grad_input", m, k, n, m, grad_output, bits_for(count), kind)

    def fused(config: Config) -> Tensor:
        default = weight if stored is None else stored
        return compute(
            out, grad_input_kernel, product, config, grad=rows, weight=weight, stored=default, M=m, N=n, K=k,
            **row_strides, grad_col=rows.stride(-1), **_strides(weight, default),
            EVEN=n % GROUP.value == 0 and k % config.across == 0,
            INDEX=launch.index_type(m, n, k, n * rows.stride(-1), *(n * t.stride(0) for t in (weight, default, map))),
            **launch.subnetwork(active, *partition),
        )  # fmt: skip

    return plans.run(
        product, fused, lambda: rebuilt.linear_grad_input(rebuild_into, out, grad_output, weight, active, *partition)
    )


def linear_grad_weight(grad_output: Tensor, x: Tensor, update: int, map: Tensor, count: int) -> Tensor:
    out = empty_linear_grad_weight(grad_output, x)
    n, k = out.shape
    grad_rows, m, grad_strides = launch.rows_of(grad_output)
    x_rows, _, x_strides = launch.rows_of(x)
    if m == 0:
        return out.zero_()
    product = _product("linear_grad_weight", n, k, m, m, x, bits_for(count), "none")

    def fused(config: Config) -> Tensor:
        return compute(
            out, grad_weight_kernel, product, config, grad=grad_rows, x=x_rows, M=m, N=n, K=k,
            **{f"grad_{name}": stride for name, stride in grad_strides.items()}, grad_col=grad_rows.stride(-1),
            **x_strides, x_col=x_rows.stride(-1), map=map, map_stride=map.stride(0), update=update,
            BITS=bits_for(count), EVEN=m % GROUP.value == 0 and n % config.down == 0 and k % config.across == 0,
            NESTED=grad_strides["inner"] > 1 or x_strides["inner"] > 1,
            INDEX=launch.index_type(m, n, k, *(m * lie["outer_stride"] for lie in (grad_strides, x_strides))),
        )  # fmt: skip

    return plans.run(product, fused, lambda: rebuilt.linear_grad_weight(keep, out, grad_output, x, update, map, count))
