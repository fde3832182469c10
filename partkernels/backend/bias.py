"""The bias of a subnetwork, b_1 + ... + b_k of rows [C, out_features] (Appendix I.2)."""

from __future__ import annotations

import torch
from torch import Tensor


def live_bias(bias: Tensor | None, active: int) -> Tensor | None:
    """Return b_1 + ... + b_active of rows [C, out_features]; return a bias [out_features] unchanged."""
    return bias if bias is None or bias.dim() == 1 else bias[:active].sum(0)


def learning_bias(bias: Tensor | None, active: int, update: int | None) -> Tensor | None:
    """Return the bias of a subnetwork; in a bias with rows, only row `update` receives a gradient."""
    if bias is None or bias.dim() == 1:
        return bias
    rows = bias.detach()
    if update is not None:
        rows = torch.cat([rows[: update - 1], bias[update - 1 : update], rows[update:]])
    return live_bias(rows, active)
