"""The bias of a subnetwork, b_1 + ... + b_k (Appendix I.2), and its gradient."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def live_bias(bias: Tensor | None, active: int) -> Tensor | None:
    """b_1 + ... + b_active of rows [C, out_features]; a bias [out_features] as it is."""
    return bias if bias is None or bias.dim() == 1 else bias[:active].sum(0)


def bias_gradient(grad: Tensor, shape: tuple[int, ...], update: int | None) -> Tensor | None:
    """The gradient of a bias of this shape, given that of the live one [out_features]: of rows, row `update` has it."""
    if len(shape) == 1:
        return grad
    return None if update is None else F.pad(grad[None], (0, 0, update - 1, shape[0] - update))
