"""The C++ backend: csrc/cpu, which rebuilds a subnetwork's weight block by block and never holds all of it.

float32, float64 and bfloat16 (accumulated in float32); threads are PyTorch's own. Linear layers are multiplied there,
faster than by PyTorch; convolutions are PyTorch's own, for what csrc/torch/convolution.cpp rebuilds of a weight, MiB by
MiB. The convolutions of csrc/cpu serve the few cases that are left.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from partkernels import packed_map

_cpu = torch.ops.partkernels_cpu


def __getattr__(name: str) -> Callable:
    """The operator of csrc/torch/cpu.cpp of this name, looked up when first asked for: the library is loaded then."""
    operator = getattr(_cpu, name).default
    globals()[name] = operator
    return operator


def random_map(rows: int, cols: int, sizes: list[int], seed: int) -> Tensor:
    width = packed_map.row_bytes(cols, packed_map.bits_for(len(sizes)))
    map = torch.zeros(rows, width, dtype=torch.uint8, device="cpu")
    _cpu.random_map(map, cols, sizes, seed)
    return map


def drawn(kind, step, seed, stream, shape, dtype, device):
    rows, cols = packed_map.matrix_shape(shape)
    # The weight of a subnetwork of which no entry is live: every row has the same map, of partition 2 alone.
    weight = torch.empty(1, 1, dtype=torch.bfloat16, device=device).expand(rows, cols)  # what every default is
    dead = torch.full((1, packed_map.row_bytes(cols, bits=1)), 0xFF, dtype=torch.uint8, device=device).expand(rows, -1)
    matrix = _cpu.subnetwork_weight(weight, 1, dead, None, 2, kind, step, seed, stream)
    return packed_map.from_matrix(matrix, shape).to(dtype).contiguous()
