"""The concrete relaxation of the Bernoulli distribution (Maddison et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def concrete(logits: Tensor, shape: Sequence[int], temperature: float) -> Tensor:
    """Draws z = sigmoid((logits + logit(u)) / temperature), u ~ U(0, 1): nearly 0 or 1, and differentiable in logits.

    Args:
        logits: logit(p), such that z > 1/2 with probability p; they broadcast to shape.

    Returns:
        z of the given shape, of logits' dtype and on their device.

    Example:
        >>> concrete(torch.tensor([-50.0, 50.0]), (3, 2), temperature=0.1)[0]
        tensor([0., 1.])
    """
    # 1.2e-7 in float32; the code of Gal et al. (2017) has 1e-7, which lower precisions round to 0.
    eps = torch.finfo(logits.dtype).eps
    noise = torch.rand(shape, dtype=logits.dtype, device=logits.device).logit(eps=eps)
    return ((logits + noise) / temperature).sigmoid()


def check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}; pass a positive number.")
