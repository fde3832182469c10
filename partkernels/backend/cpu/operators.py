"""The C++ backend, csrc/cpu, which rebuilds a subnetwork's weight block by block and never stores all of it.

It serves float32, float64 and bfloat16 (accumulated in float32), on PyTorch's threads. Linear layers use csrc/cpu,
which is faster than PyTorch. Convolutions use PyTorch's kernels on weights that csrc/torch/cpu/conv2d.cpp rebuilds, at
most 16 MiB at a time; a few remaining cases use the convolutions of csrc/cpu.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from partkernels.arguments import bits_for, row_bytes
from partkernels.backend.reference.embedding import check_ids

_cpu = torch.ops.partkernels_cpu


def __getattr__(name: str) -> Callable:
    """Look up an operator of csrc/torch by name, when it is first used: the library is loaded by then."""
    operator = getattr(_cpu, name).default._op  # the overload does no more than call this, in half a microsecond
    globals()[name] = operator
    return operator


prepared = None  # it has no tables: calls of its operators cost a microsecond


def embedding(weight: Tensor, ids: Tensor, *rest) -> Tensor:
    check_ids(ids, weight.shape[0])
    return _cpu.embedding(weight, ids, *rest)


def random_map(rows: int, cols: int, sizes: list[int], seed: int) -> Tensor:
    width = row_bytes(cols, bits_for(len(sizes)))
    map = torch.zeros(rows, width, dtype=torch.uint8, device="cpu")
    _cpu.random_map(map, cols, sizes, seed)
    return map
