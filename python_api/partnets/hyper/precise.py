"""Precise: modules with parameters of at least single precision."""

from __future__ import annotations

from torch import Tensor, nn


class Precise(nn.Module):
    """A module that keeps its parameters in single precision if the model is converted to a lower one.

    In lower precision, updates of ψ round to zero.

    Example:
        >>> import torch
        >>> class Number(Precise):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.raw = nn.Parameter(torch.zeros(()))
        >>> Number().bfloat16().raw.dtype, Number().double().raw.dtype
        (torch.float32, torch.float64)
    """

    def _apply(self, fn, recurse=True):
        def moved(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            return tensor.to(new.device) if new.is_floating_point() and new.itemsize < 4 <= tensor.itemsize else new

        return super()._apply(moved, recurse)
