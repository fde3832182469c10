"""The peers of an operator: the dense one, torch.where as a user would write it, and ours on each backend.

Each computes one of WORKS from the tensors only, and keeps nothing from earlier calls. So the gradient of the input by
`where` materialises the subnetwork's weight, as under activation checkpointing; the suite's training cases show the
cost of autograd keeping that copy alive instead.

"partkernels triton" chooses its plan; "partkernels triton fused" and "partkernels triton rebuild" use the plan in their
name (see PLANS).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial

import torch
from torch import Tensor

import partkernels as pk
from partbench.measuring.timing import Missing, Run
from partbench.peers.layer import Layer, Tensors
from partkernels.backend.dispatch import READY, backends, noting
from partkernels.backend.plan import NAMES, use_plan
from partkernels.operators.registration import calls
from partkernels.testing import Yardstick

WORKS = ("forward", "grad_input", "grad_weight")
# Plans of GPU backends: one fused kernel, or a rebuilt weight and the vendor's kernel.
PLANS = NAMES
# PyTorch chooses among algorithms by memory format: its convolutions had 3.2 times the error on a channels_last weight,
# which torch.compile makes.
PEERS_SLACK = 4.0
# In float64, the truth itself has errors: those of MKL's product are 9 times ours, at depth 4096.
FLOAT64_SLACK = 4.0


def peers(names: tuple[str, ...], work: str, active: int) -> dict[str, Callable[[Tensors], Run]]:
    """Return a function for each peer's name that makes its Run of one of WORKS, with update=active."""
    return {name: partial(_run, name, work, active) for name in names}


def _run(name: str, work: str, active: int, tensors: Tensors) -> Run:
    if name == "dense":
        call = _dense(tensors, work, active)
    elif name in ("where", "where, compiled"):
        call = _where(tensors, work, active, compiler=name != "where")
    else:
        _, backend, *plan = name.split()
        call = ours(tensors, work, active, backend)
        if plan:
            call = _planned(call, *plan)
    return Run(call, lambda: _check(tensors, work, active, call(), ours=name.startswith("partkernels")))


def _subnetwork_weight(tensors: Tensors, active: int) -> Tensor:
    return torch.where(tensors.ids <= active, tensors.weight, tensors.defaults)


def _work(layer: Layer, work: str, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """Compute one of WORKS by PyTorch's dense operators."""
    if work == "forward":
        return layer.dense(x, weight)
    if work == "grad_input":
        return layer.dense_grad_input(grad, weight)
    return layer.dense_grad_weight(grad, x)


def _dense(tensors: Tensors, work: str, active: int) -> Callable[[], Tensor]:
    """Return the dense layer that ours replaces, with a materialised weight."""
    weight = _subnetwork_weight(tensors, active)
    return lambda: _work(tensors.layer, work, tensors.x, tensors.grad, weight)


def _where(tensors: Tensors, work: str, active: int, compiler: bool) -> Callable[[], Tensor]:
    """Return the work with byte ids and stored defaults; as in autograd, the weight's gradient keeps active entries."""
    layer = tensors.layer

    def forward_or_grad_input(x, grad, weight, ids, defaults, active):
        return _work(layer, work, x, grad, torch.where(ids <= active, weight, defaults))

    def grad_weight(x, grad, weight, ids, defaults, active):
        return torch.where(ids <= active, _work(layer, work, x, grad, weight), 0)

    function = grad_weight if work == "grad_weight" else forward_or_grad_input
    if compiler:
        function = compiled(function, layer, work)
    # A tensor, because each number would cause another compilation.
    active = torch.tensor(active, dtype=torch.uint8, device=layer.device) if compiler else active
    arguments = tensors.x, tensors.grad, tensors.weight, tensors.ids, tensors.defaults, active
    return lambda: function(*arguments)


_compilations: dict[tuple, Callable] = {}


def compiled(function: Callable, layer: Layer, work: str) -> Callable:
    """Return the function under torch.compile(max-autotune), compiled once for all passes."""
    key = layer, work
    if key not in _compilations:
        # Each case is a separate compilation; past the limit, PyTorch would silently run it uncompiled.
        torch._dynamo.config.recompile_limit = 10_000
        # On a GPU without torch.compile's CUDA graphs, because the clock captures every call in one.
        mode = "max-autotune-no-cudagraphs" if layer.device.type == "cuda" else "max-autotune"
        _compilations[key] = torch.compile(function, mode=mode, dynamic=False)
    return _compilations[key]


def ours(tensors: Tensors, work: str, active: int, backend: str) -> Callable[[], Tensor]:
    """Return our operator, as autograd calls it.

    Raises:
        Missing: the backend cannot run here.
    """
    obstacle = obstacles().get(backend)
    if obstacle:
        raise Missing(obstacle)
    layer, x, grad, weight, partition = tensors.layer, tensors.x, tensors.grad, tensors.weight, tensors.partition
    flat, owners = (*partition.flat(), backend), (partition.map, partition.num_partitions, backend)
    if layer.operator == "linear":
        return {
            "forward": lambda: calls["linear"](x, weight, None, active, None, *flat),
            "grad_input": lambda: calls["linear_grad_input"](grad, weight, active, None, *flat),
            "grad_weight": lambda: calls["linear_grad_weight"](grad, x, active, *owners),
        }[work]
    geometry = *([n, n] for n in (layer.stride, layer.padding, layer.dilation)), layer.groups
    return {
        "forward": lambda: calls["conv2d"](x, weight, None, *geometry, active, None, *flat),
        "grad_input": lambda: calls["conv2d_grad_input"](grad, weight, layer.x, *geometry, active, None, *flat),
        "grad_weight": lambda: calls["conv2d_grad_weight"](grad, x, layer.weight[2:], *geometry, active, *owners),
    }[work]


def under_plan(plan: str) -> AbstractContextManager:
    """Make a GPU backend compute all products in the block by one of PLANS; if plan is empty, by its choice."""
    return use_plan(plan) if plan else nullcontext()


def _planned(call: Callable[[], Tensor], plan: str) -> Callable[[], Tensor]:
    def planned() -> Tensor:
        with under_plan(plan):
            return call()

    with noting() as notes:
        planned()
    # If a plan does not support a product, another one computes it, and its figures would have the wrong name.
    if f"; {plan}" not in notes[0]:
        raise Missing(notes[0])
    return planned


@cache
def obstacles() -> dict[str, str]:
    """Return why a backend cannot run here, for each that cannot."""
    return {name: status for name, status in backends().items() if status != READY}


def _yardstick(tensors: Tensors, work: str, active: int) -> Yardstick:
    with pk.use_backend("reference"):
        weight = pk.subnetwork_weight(tensors.weight, tensors.partition, active)
    operands = tensors.x, tensors.grad, weight
    return Yardstick(lambda dtype: _work(tensors.layer, work, *(t.to(dtype) for t in operands)), tensors.layer.dtype)


def _check(tensors: Tensors, work: str, active: int, got: Tensor, ours: bool) -> None:
    """Apply the tolerance rule; the truth is the dense operator with the reference's materialised weight."""
    yardstick = tensors.once(work, lambda: _yardstick(tensors, work, active))
    got = masked(tensors, active, got, yardstick, ours) if work == "grad_weight" else got
    yardstick.check(got, slack=slack(tensors.layer, ours))


def masked(tensors: Tensors, active: int, got: Tensor, yardstick: Yardstick, ours: bool) -> Tensor:
    """Set a weight's gradient to the truth outside the updated partition, where peers mask different entries.

    Raises:
        AssertionError: the gradient is ours, and not 0 there.
    """
    owned = tensors.ids == active
    assert not ours or not got[~owned].any(), "the weight gradient is not 0 outside the updated partition"
    return torch.where(owned, got, yardstick.truth.to(got.dtype))


def slack(layer: Layer, ours: bool) -> float:
    """Return the factor of the tolerance rule's allowance."""
    if layer.dtype == torch.float64:
        return FLOAT64_SLACK
    return 1.0 if ours else PEERS_SLACK
