"""The peers of a layer in training: forward and backward through autograd, with all that the host does for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

import partkernels as pk
from benchmarks.measuring.timing import Missing, Run
from benchmarks.peers import schemes
from benchmarks.peers.layer import Layer, Tensors
from benchmarks.peers.operators import compiled, obstacles, slack
from partkernels.testing import Yardstick


def peers(names: tuple[str, ...], active: int) -> dict[str, Callable[[Tensors], Run]]:
    """For each peer's name, what makes its Run; subnetwork and partition `active` are live and updated."""
    return {name: partial(_run, name, active) for name in names}


def _run(name: str, active: int, tensors: Tensors) -> Run:
    scheme, _, backend = name.partition(" ")
    if backend in obstacles():
        raise Missing(obstacles()[backend])
    module = schemes.under(scheme.rstrip(","), tensors.module, active, active)
    x = tensors.x.clone().requires_grad_()
    weight = schemes.weight(module)
    bias = next(parameter for parameter in module.parameters() if parameter is not weight)
    forward = module
    if name == "where, compiled":
        function = compiled(_where, tensors.layer, "training")
        live = torch.tensor(active, dtype=torch.uint8, device=x.device)
        forward = partial(function, tensors.layer, live, tensors.ids, tensors.defaults, weight, bias)

    def call() -> tuple[Tensor, ...]:
        with pk.use_backend(backend if scheme == "partkernels" else "auto"):
            y = forward(x)
            return y, *torch.autograd.grad(y, (x, weight, bias), tensors.grad)

    return Run(call, lambda: _check(tensors, active, *call()[:3], ours=scheme == "partkernels"))


def _where(layer: Layer, active: Tensor, ids, defaults, weight, bias, x) -> Tensor:
    weight = torch.where(ids <= active, weight, defaults)
    if layer.operator == "linear":
        return F.linear(x, weight, bias)
    return F.conv2d(x, weight, bias, **layer.geometry)


def _yardsticks(tensors: Tensors, active: int) -> list[Yardstick]:
    with pk.use_backend("reference"):
        ordinary = tensors.module.to_ordinary(active)

    @cache
    def dense(dtype: torch.dtype) -> tuple[Tensor, ...]:
        module = copy.deepcopy(ordinary).to(dtype)
        x = tensors.x.to(dtype).requires_grad_()
        y = module(x)
        return y.detach(), *torch.autograd.grad(y, (x, module.weight), tensors.grad.to(dtype))

    return [Yardstick(lambda dtype, i=i: dense(dtype)[i], tensors.layer.dtype) for i in range(3)]


def _check(tensors: Tensors, active: int, y: Tensor, grad_x: Tensor, grad_weight: Tensor, *, ours: bool) -> None:
    """The tolerance rule for the output and the gradients of x and of the partition's weights."""
    yardsticks = tensors.once("training", lambda: _yardsticks(tensors, active))
    owned = tensors.ids == active
    if ours:
        assert not grad_weight[~owned].any(), "the weight gradient is not 0 outside the updated partition"
    # Peers differ in which other entries of the gradient they mask.
    grad_weight = torch.where(owned, grad_weight, yardsticks[2].truth.to(grad_weight.dtype))
    for yardstick, got in zip(yardsticks, (y.detach(), grad_x, grad_weight), strict=True):
        yardstick.check(got, slack=slack(tensors.layer, ours))
