from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from partkernels.backend.bias import live_bias
from partkernels.backend.reference.subnetwork_weight import subnetwork_weight, subnetwork_weight_grad


def empty_linear(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, active: int, update: int | None, *partition: Any) -> Tensor:
    """Return y = x w_s^(k)^T + bias; a bias [C, out_features] contributes b_1 + ... + b_k."""
    return F.linear(x, subnetwork_weight(weight, active, *partition), live_bias(bias, active))


def empty_linear_grad_input(grad_output: Tensor, weight: Tensor, *_: object) -> Tensor:
    return grad_output.new_empty(*grad_output.shape[:-1], weight.shape[1])


def linear_grad_input(grad_output: Tensor, weight: Tensor, active: int, update: int | None, *partition: Any) -> Tensor:
    """Return dx = dy w_s^(k)."""
    return grad_output @ subnetwork_weight(weight, active, *partition)


def empty_linear_grad_weight(grad_output: Tensor, x: Tensor, *_: object) -> Tensor:
    return x.new_empty(grad_output.shape[-1], x.shape[-1])


def linear_grad_weight(grad_output: Tensor, x: Tensor, update: int, map: Tensor, count: int) -> Tensor:
    """Return dw = dy^T x at the entries of partition update, 0 elsewhere."""
    grad = grad_output.reshape(-1, grad_output.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
    return subnetwork_weight_grad(grad, update, update, map, count)
