"""embedding: rows of a subnetwork's weight, gathered and rebuilt in one pass."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from partkernels.backend.reference.embedding import check_ids, empty_embedding
from partkernels.backend.triton import launch
from partkernels.backend.triton.passes import over, tile_of_pass
from partkernels.backend.triton.rebuild import GROUP, rebuild


@triton.jit(do_not_specialize=("count", *launch.WORDS))
def embedding_kernel(
    ids, weight, stored, out, map, count, cols, weight_row, weight_col, stored_row, stored_col, map_stride, row_bytes,
    low: tl.uint32, addend: tl.uint32, below: tl.uint32, step: tl.uint32,
    seed_low: tl.uint32, seed_high: tl.uint32, stream_low: tl.uint32, stream_high: tl.uint32,
    first_row: tl.uint32, first_group: tl.uint32,
    BITS: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr,
    INDEX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Write the rows of w_k given by ids to out [count, cols]."""
    first_at, first_column = tile_of_pass(tl.program_id(0), count, cols, INDEX, DOWN, ACROSS)
    at = first_at + tl.arange(0, DOWN)
    row = tl.load(ids + at, at < count, 0)[:, None]
    column = first_column + tl.arange(0, ACROSS)[None, :]
    inside = (at < count)[:, None] & (column < cols)
    tile = tl.load(weight + row * weight_row + column.to(tl.int64) * weight_col, inside)
    default = tile
    if KIND == "stored":
        default = tl.load(stored + row * stored_row + column.to(tl.int64) * stored_col, inside)
    tile = rebuild(
        tile, default, map + row[:, :, None] * map_stride, row + first_row, first_column // GROUP,
        row_bytes, low, addend, below, step, seed_low, seed_high, stream_low, stream_high, first_group,
        BITS, KIND, False, ASM,
    )  # fmt: skip
    tl.store(out + at[:, None] * cols + column, tile, inside)


def embedding(
    weight: Tensor, ids: Tensor, padding_idx: int, active: int, update: int | None, map: Tensor,
    stored: Tensor | None, count: int, kind: str, *draw: Any,
) -> Tensor:  # fmt: skip
    check_ids(ids, weight.shape[0])
    if active == count:
        return F.embedding(ids, weight)
    out = empty_embedding(weight, ids)
    if out.numel() == 0:
        return out
    default = weight if stored is None else stored
    cols, named = weight.shape[1], ids.contiguous()
    grid, tiles = over(named.numel(), cols)
    with launch.on(weight):
        embedding_kernel[grid](
            named, weight, default, out, count=named.numel(), cols=cols,
            weight_row=weight.stride(0), weight_col=weight.stride(1),
            stored_row=default.stride(0), stored_col=default.stride(1),
            **launch.subnetwork(active, map, stored, count, kind, *draw), **tiles,
        )  # fmt: skip
    return out
