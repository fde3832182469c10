"""Changes of many tensors in one launch: entries saved and replaced, and rows summed or multiplied.

A table in the GPU's memory says what each program does. It is made once and used for every switch between two
subnetworks, so that a launch takes no longer than that of one tensor, and a CUDA graph can replay it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from partkernels.backend.triton import launch
from partkernels.backend.triton.arithmetic import round_to

# Entries of a program. Each takes 2 loads and 2 stores of 4 bytes at places that are not adjacent.
_BLOCK = 1024
_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_REPLACE, _SUM, _PRODUCT = 0, 1, 2


@triton.jit(do_not_specialize=("active", "skip"))
def exchange_kernel(table, programs, active, skip, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Do what a row of the table says, for one block of its entries.

    table: [items, 6], of each the kind, four addresses (0 where there is none), and the number of entries.
    programs: [number, 2], the row of each program and its first entry.
    active: how many rows are combined.
    skip: a row that is left out, from 0; -1 for none.
    """
    item = tl.load(programs + 2 * tl.program_id(0))
    i = tl.load(programs + 2 * tl.program_id(0) + 1) + tl.arange(0, BLOCK)
    row = table + item * 6
    kind = tl.load(row)
    first = tl.load(row + 1).to(tl.pointer_type(TYPE))
    count = tl.load(row + 5)
    inside = i < count
    if kind == 0:
        places = tl.load(row + 2).to(tl.pointer_type(tl.int32))
        values = tl.load(row + 3).to(tl.pointer_type(TYPE))
        at = tl.load(places + i, inside, 0)
        saved = tl.load(row + 4)
        if saved != 0:
            tl.store(saved.to(tl.pointer_type(TYPE)) + i, tl.load(first + at, inside, 0), inside)
        tl.store(first + at, tl.load(values + i, inside, 0), inside)
    else:
        rows = tl.load(row + 2).to(tl.pointer_type(TYPE))
        WIDE: tl.constexpr = tl.float64 if tl.float64 == TYPE else tl.float32
        total = tl.full([BLOCK], 0, WIDE) + tl.where(kind == 2, 1, 0)
        for k in range(active):
            value = tl.load(rows + k * count + i, inside, 0).to(WIDE)
            combined = tl.where(kind == 2, total * value, total + value)
            total = tl.where(k == skip, total, combined)
        tl.store(first + i, round_to(total, TYPE), inside)


def prepared(
    tensors: Sequence[Tensor],
    places: Sequence[Tensor],
    values: Sequence[Tensor],
    saved: Sequence[Tensor],
    vectors: Sequence[Tensor],
    rows: Sequence[Tensor],
    are_products: Sequence[int],
) -> Callable[[int, int], None]:
    """Return a function of `active` and `skip` that replaces entries and combines rows, in one launch.

    Args:
        tensors, places, values, saved: see partkernels.operators.entries.exchange_entries; places are int32.
        vectors, rows, are_products: see combine_rows.
    """
    items = [
        (_REPLACE, *(one.data_ptr() if one.numel() else 0 for one in of), of[1].numel())
        for of in zip(tensors, places, values, saved, strict=True)
    ]
    items += [
        (_PRODUCT if is_product else _SUM, vector.data_ptr(), each.data_ptr(), 0, 0, vector.numel())
        for vector, each, is_product in zip(vectors, rows, are_products, strict=True)
    ]
    programs = [(number, first) for number, item in enumerate(items) for first in range(0, item[-1], _BLOCK)]
    if not programs:
        return lambda active, skip=-1: None
    like = [*tensors, *vectors][0]
    table = torch.tensor(items, dtype=torch.int64, device="cpu").to(like.device)
    blocks = torch.tensor(programs, dtype=torch.int32, device="cpu").to(like.device)
    alive = tensors, places, values, saved, vectors, rows  # whose addresses are in the table

    def run(active: int, skip: int = -1) -> None:
        assert alive is not None
        with launch.on(like):
            exchange_kernel[(len(programs),)](table, blocks, active, skip, TYPE=_TYPES[like.dtype], BLOCK=_BLOCK)

    return run


def exchange_entries(
    tensors: Sequence[Tensor], places: Sequence[Tensor], values: Sequence[Tensor], saved: Sequence[Tensor]
) -> None:
    prepared(tensors, [at.int() for at in places], values, saved, (), (), ())(0)


def combine_rows(
    vectors: Sequence[Tensor], rows: Sequence[Tensor], active: int, are_products: Sequence[int], skip: int = -1
) -> None:
    prepared((), (), (), (), vectors, rows, are_products)(active, skip)
