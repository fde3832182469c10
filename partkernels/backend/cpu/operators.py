"""The C++ backend, csrc/cpu, which rebuilds a subnetwork's weight block by block and never stores all of it.

It serves float32, float64 and bfloat16 (accumulated in float32), on PyTorch's threads. Linear layers use csrc/cpu,
which is faster than PyTorch. Convolutions use PyTorch's kernels on weights that csrc/torch/cpu/conv2d.cpp rebuilds, at
most 16 MiB at a time; a few remaining cases use the convolutions of csrc/cpu.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from partkernels.arguments import bits_for, row_bytes
from partkernels.backend.reference.embedding import check_ids

_cpu = torch.ops.partkernels_cpu


def __getattr__(name: str) -> Callable[..., Any]:
    """Look up an operator of csrc/torch by name, when it is first used: the library is loaded by then."""
    operator = getattr(_cpu, name).default._op  # the overload does no more than call this, in half a microsecond
    globals()[name] = operator
    return operator


def prepared(
    tensors: Sequence[Tensor],
    places: Sequence[Tensor],
    values: Sequence[Tensor],
    saved: Sequence[Tensor],
    vectors: Sequence[Tensor],
    rows: Sequence[Tensor],
    are_products: Sequence[int],
) -> Callable[[int, int], None]:
    """Return a function of `active` and `skip` that replaces entries and combines rows, by tables of addresses.

    Args:
        tensors, places, values, saved: see partkernels.operators.entries.exchange_entries.
        vectors, rows, are_products: see combine_rows.
    """
    replacements = [
        (tensor, tensor.numel(), tensor.element_size(), at, at.element_size(), at.numel(), others, mine)
        for tensor, at, others, mine in zip(tensors, places, values, saved, strict=True)
    ]
    combinations = [
        (vector, each, vector.numel(), vector.element_size(), is_product)
        for vector, each, is_product in zip(vectors, rows, are_products, strict=True)
    ]
    tables = _addresses(replacements), _addresses(combinations)
    exchange, alive = _cpu.exchange_by_tables.default._op, (tensors, places, values, saved, vectors, rows)

    def run(active: int, skip: int = -1) -> None:
        assert alive is not None
        exchange(*tables, active, skip)

    return run


def _addresses(rows: list[tuple]) -> Tensor:
    """Return int64 [len(rows), fields], with the addresses of tensors, 0 of empty ones."""
    numbers = [[one.data_ptr() if isinstance(one, Tensor) else one for one in row] for row in rows]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def embedding(weight: Tensor, ids: Tensor, *rest: Any) -> Tensor:
    check_ids(ids, weight.shape[0])
    return _cpu.embedding(weight, ids, *rest)


def random_map(rows: int, cols: int, sizes: list[int], seed: int) -> Tensor:
    width = row_bytes(cols, bits_for(len(sizes)))
    map = torch.zeros(rows, width, dtype=torch.uint8, device="cpu")
    _cpu.random_map(map, cols, sizes, seed)
    return map
