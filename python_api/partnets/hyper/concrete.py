"""The concrete relaxation of the Bernoulli distribution (Maddison et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def concrete(logits: Tensor, shape: Sequence[int], temperature: float) -> Tensor:
    """Draw z = sigmoid((logits + logit(u)) / temperature), u ~ U(0, 1): nearly 0 or 1, and differentiable in logits.

    torch.distributions.RelaxedBernoulli has the same distribution in float32, but takes p instead of its logit, which
    costs more operations. Forward and backward of [128, 784] take 1.7 ms there and 0.6 ms here in float32, 2.1 and 1.0
    in bfloat16, 1.9 and 1.3 in float16 (minimum of 1000 runs on one core of an AMD EPYC). It also clamps p to
    [eps, 1 - eps]: in bfloat16 p stays between 0.8 % and 99.2 %, and the gradient is 0 for logits beyond ±5.5.

    Args:
        logits: logit(p), where P(z > 1/2) = p; broadcast to shape.

    Returns:
        z of the given shape, with the dtype and device of logits.

    Example:
        >>> concrete(torch.tensor([-50.0, 50.0]), (3, 2), temperature=0.1)[0]
        tensor([0., 1.])
    """
    # 1.2e-7 in float32. The code of Gal et al. (2017) uses 1e-7, which rounds to 0 in lower precisions.
    eps = torch.finfo(logits.dtype).eps
    noise = torch.rand(shape, dtype=logits.dtype, device=logits.device).logit(eps=eps)
    return ((logits + noise) / temperature).sigmoid()


def check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}; pass a positive number.")
