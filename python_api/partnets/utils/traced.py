"""Who looks at what is computed: PyTorch's compiler, its function transforms, or a recording of a GPU's kernels."""

from __future__ import annotations

import torch
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad


def is_traced() -> bool:
    """Whether PyTorch is to see a definition: its compiler fuses that, and torch.func and forward mode need it."""
    is_followed = torch.compiler.is_compiling() or _are_functorch_transforms_active()
    return is_followed or forward_ad._current_level >= 0


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded, in which nobody may ask for the state of random numbers."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
