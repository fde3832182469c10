"""The peers of a layer in training: forward and backward through autograd, including all of the host's work."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

import partkernels as pk
import partnets
from partbench.measuring.timing import Missing, Run
from partbench.peers import schemes
from partbench.peers.layer import Tensors
from partbench.peers.operators import compiled, masked, obstacles, slack
from partkernels.testing import Yardstick


def peers(names: tuple[str, ...], active: int) -> dict[str, Callable[[Tensors], Run]]:
    """Return a function for each peer's name that makes its Run, with update=active."""
    return {name: partial(_run, name, active) for name in names}


def _run(name: str, active: int, tensors: Tensors) -> Run:
    scheme, _, backend = name.partition(" ")
    if backend in obstacles():
        raise Missing(obstacles()[backend])
    scheme = scheme.rstrip(",")
    module = schemes.under(scheme, tensors.module, active, active)
    x, weight, layer = tensors.x.clone().requires_grad_(), schemes.weight(module), tensors.layer
    bias, forward = next(parameter for parameter in module.parameters() if parameter is not weight), module
    if name == "where, compiled":
        live = torch.tensor(active, dtype=torch.uint8, device=x.device)

        def where(live, ids, defaults, weight, bias, x) -> Tensor:
            return layer.dense(x, torch.where(ids <= live, weight, defaults), bias)

        forward = partial(compiled(where, layer, "training"), live, tensors.ids, tensors.defaults, weight, bias)

    def call() -> tuple[Tensor, ...]:
        own = pk.use_backend(backend if scheme == "partkernels" else "auto")
        with own, schemes.inside(scheme, module, active, active):
            y = forward(x)
            return y, *torch.autograd.grad(y, (x, weight, bias), tensors.grad)

    return Run(call, lambda: _check(tensors, active, *call()[:3], ours=scheme == "partkernels"))


def _yardsticks(tensors: Tensors, active: int) -> list[Yardstick]:
    with pk.use_backend("reference"):
        dense = partnets.merge(tensors.module, active)

    @cache
    def truth(dtype: torch.dtype) -> tuple[Tensor, ...]:
        module, x = copy.deepcopy(dense).to(dtype), tensors.x.to(dtype).requires_grad_()
        y = module(x)
        return y.detach(), *torch.autograd.grad(y, (x, module.weight), tensors.grad.to(dtype))

    return [Yardstick(lambda dtype, i=i: truth(dtype)[i], tensors.layer.dtype) for i in range(3)]


def _check(tensors: Tensors, active: int, y: Tensor, grad_x: Tensor, grad_weight: Tensor, *, ours: bool) -> None:
    """Apply the tolerance rule to the output and to the gradients of x and of the partition's weights."""
    yardsticks = tensors.once("training", lambda: _yardsticks(tensors, active))
    grad_weight = masked(tensors, active, grad_weight, yardsticks[2], ours)
    for yardstick, got in zip(yardsticks, (y.detach(), grad_x, grad_weight), strict=True):
        yardstick.check(got, slack=slack(tensors.layer, ours))
