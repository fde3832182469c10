"""conv2d and its gradients by PyTorch's kernels, on a weight that is rebuilt completely.

Fused Triton kernels took 12 to 14 times as long as cuDNN on an H200 (benchmarks/results/h200.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from partkernels.backend import rebuilt
from partkernels.backend.reference.conv2d import memory_format
from partkernels.backend.triton.subnetwork_weight import keep, rebuild_into


def _subnetwork_weight(weight: Tensor, like: Tensor, *partition) -> Tensor:
    """Return the subnetwork's weight in the memory format of the images."""
    return rebuild_into(torch.empty_like(weight, memory_format=memory_format(like)), weight, *partition)


def conv2d(*arguments: Any) -> Tensor:
    return rebuilt.conv2d(_subnetwork_weight, *arguments)


def conv2d_grad_input(*arguments: Any) -> Tensor:
    return rebuilt.conv2d_grad_input(_subnetwork_weight, *arguments)


def conv2d_grad_weight(*arguments: Any) -> Tensor:
    return rebuilt.conv2d_grad_weight(keep, *arguments)
