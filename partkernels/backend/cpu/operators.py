"""The C++ backend: csrc/cpu, which rebuilds a subnetwork's weight block by block and never holds all of it.

float32, float64 and bfloat16 (accumulated in float32); threads are PyTorch's own. Linear layers are multiplied there,
faster than by PyTorch; convolutions are PyTorch's own, for what csrc/torch/cpu/conv2d.cpp rebuilds of a weight, MiB by
MiB. The convolutions of csrc/cpu serve the few cases that are left.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from partkernels.arguments import bits_for, row_bytes
from partkernels.backend.reference.embedding import check_ids

_cpu = torch.ops.partkernels_cpu


def __getattr__(name: str) -> Callable:
    """The operator of csrc/torch of this name, looked up when first asked for: the library is loaded then."""
    operator = getattr(_cpu, name).default._op  # itself calls no more than this, and takes half a microsecond for it
    globals()[name] = operator
    return operator


def embedding(weight: Tensor, ids: Tensor, *rest) -> Tensor:
    check_ids(ids, weight.shape[0])
    return _cpu.embedding(weight, ids, *rest)


def random_map(rows: int, cols: int, sizes: list[int], seed: int) -> Tensor:
    width = row_bytes(cols, bits_for(len(sizes)))
    map = torch.zeros(rows, width, dtype=torch.uint8, device="cpu")
    _cpu.random_map(map, cols, sizes, seed)
    return map
