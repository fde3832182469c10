"""Tests whether PyTorch's compiler or its function transforms are tracing the computation."""

from __future__ import annotations

import torch
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad


def is_traced() -> bool:
    """Return whether to compute by definition: the compiler fuses it, and torch.func and forward mode need it."""
    is_followed = torch.compiler.is_compiling() or _are_functorch_transforms_active()
    return is_followed or forward_ad._current_level >= 0
