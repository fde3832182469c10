"""Precise: modules whose parameters learn in single precision at least."""

from __future__ import annotations

from torch import Tensor, nn


class Precise(nn.Module):
    """A module whose parameters, and those in it, stay of single precision where a model goes to a lower one.

    In a lower one steps of the size that ψ takes are none.

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
