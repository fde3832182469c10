"""Launches of a training step on a GPU, counted without one: few more than of a dense step, and none is waited for.

Operators of torch are counted as they are dispatched, and kernels of Triton as they are launched; these do nothing.
"""

from __future__ import annotations

import copy
import cProfile
import math
import pstats
import re
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import partkernels as pk
import partnets
from partbench import models
from partkernels.backend.triton import INTERPRETED
from partnets import hyper, optim

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="with a GPU, Triton's backend takes tensors of the GPU only")

# Operators that launch nothing: views, and memory that is not written.
VIEWS = re.compile(
    "alias|as_strided|detach|empty|empty_like|expand|lift_fresh|narrow|new_empty|permute|_reshape_alias|select|slice"
    "|split|split_with_sizes|squeeze|t|transpose|unbind|_unsafe_view|unsafe_split|unsqueeze|view"
)
# Operators with results that the host waits for, and methods that copy numbers to or from the host.
WAITING = re.compile("equal|is_nonzero|item|_local_scalar_dense|masked_select|nonzero|_?unique2?")
METHODS = ["__array__", "__bool__", "__float__", "__index__", "__int__", "cpu", "cuda", "item", "numpy", "to", "tolist"]
# The number of tensors in a launch of torch's foreach operators, by the number of lists.
MOST = {1: 110, 2: 64, 3: 48}


class Launches(TorchDispatchMode):
    """Inside, launches are counted by name in `found`, and what a GPU would have to be waited for in `waits`."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.waits = Counter(), Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        namespace, _, name = operator._schema.name.partition("::")
        if namespace == "partkernels":  # its kernels are counted where they are launched
            return operator(*args, **(kwargs or {}))
        if WAITING.fullmatch(name):
            self.waits[name] += 1
        elif name.startswith("_foreach"):
            lists = [one for one in args if isinstance(one, list | tuple) and isinstance(one[0], Tensor)]
            self.found[name] += math.ceil(len(lists[0]) / MOST[len(lists)])
        elif namespace == "aten" and not VIEWS.fullmatch(name):
            self.found[name] += 1
        return operator(*args, **(kwargs or {}))


def launches(run: Callable[[], object]) -> Launches:
    """Return the launches of a call."""
    from triton.runtime.interpreter import InterpretedFunction

    counted = Launches()

    def record(kernel, grid):
        def launch(*_, **__):
            counted.found[kernel.fn.__name__] += 1

        return launch

    def waiting(name: str):
        method = getattr(Tensor, name)

        def call(*args, **kwargs):
            result = method(*args, **kwargs)
            if result is not args[0]:  # such as a tensor that is on its device already
                counted.waits[name] += 1
            return result

        return call

    with ExitStack() as stack:
        stack.enter_context(patch.object(InterpretedFunction, "__getitem__", record))
        for name in METHODS:
            stack.enter_context(patch.object(Tensor, name, waiting(name)))
        stack.enter_context(counted)
        run()
    return counted


IMAGES = torch.rand(2, 3, 32, 32), torch.tensor([1, 7])
MODELS = {
    "MNIST CNN": (models.MnistCNN, (torch.rand(2, 1, 28, 28), torch.tensor([1, 7]))),
    "ResNet-8": (lambda: models.FixupResNet(8), IMAGES),
    "ResNet-14": (lambda: models.FixupResNet(14), IMAGES),
    "ViT-tiny": (models.ViT, IMAGES),
}
every_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setattr("partnets.subnetworks.switch.COMPARED", ())


def pair(name: str) -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]:
    """Return a dense model with a hyperparameter, the same model with three partitions, and a batch."""
    make, batch = MODELS[name]
    dense = nn.Sequential(make(), hyper.Temperature())
    return dense, partnets.partition(copy.deepcopy(dense), (0.8, 0.1, 0.1), defaults="stored"), batch


def loss_of(model: nn.Module) -> Callable[[tuple], Tensor]:
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])


def learning(model: nn.Module, loss: Callable, batch: tuple, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a dense step."""

    def step() -> None:
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()

    return step


def steps_of_weights(name: str) -> tuple[Callable[[], None], Callable[[int], Callable[[], Tensor]], nn.Module]:
    """Return a dense step of the weights, a function that returns that of partition k, and the dense network."""
    dense, model, batch = pair(name)
    dense[1].requires_grad_(False)
    step = learning(dense, loss_of(dense), batch, torch.optim.Adam(dense[0].parameters(), fused=True))
    optimizer = optim.Adam(model)
    return step, lambda k: lambda: partnets.step_weights(model, optimizer, k, batch, loss_of(model)), dense[0]


def check(ours: Launches, dense: Launches, most: int) -> None:
    more = ours.found - dense.found
    assert ours.found.total() - dense.found.total() <= most, more
    assert not ours.waits - dense.waits, ours.waits


@every_model
def test_a_step_of_the_weights_launches_at_most_six_kernels_more_than_a_dense_one(name):
    step, ours, _ = steps_of_weights(name)
    with pk.use_backend("triton"):
        for first in (step, *map(ours, (1, 2, 3))):
            launches(first)
        expected = launches(step)
        for k in (1, 2, 3):
            found = launches(ours(k))
            assert found.found["adam_kernel"] == found.found["counting_kernel"] == 1
            check(found, expected, 6)


@every_model
def test_a_step_of_the_hyperparameters_launches_at_most_four_kernels_more_than_a_dense_one(name):
    dense, model, batch = pair(name)
    dense[0].requires_grad_(False)
    step = learning(dense, loss_of(dense), batch, torch.optim.Adam(dense[1].parameters(), fused=True))
    psi = torch.optim.Adam(model[1].parameters(), fused=True)

    def ours(k: int) -> Callable[[], None]:
        return lambda: partnets.step_hyper(model, psi, {k: batch}, loss_of(model))

    with pk.use_backend("triton"):
        for first in (step, *map(ours, (2, 3))):
            launches(first)
        expected = launches(step)
        for k in (2, 3):
            found = launches(ours(k))
            check(found, expected, 4)


@every_model
def test_a_step_of_the_weights_calls_few_functions_more_than_a_dense_one(name):
    # On a fast GPU, the steps of small networks wait for Python.
    step, ours, network = steps_of_weights(name)

    def calls(run: Callable[[], object]) -> int:
        profile = cProfile.Profile()
        for _ in range(2):
            run()
        profile.runcall(run)
        return pstats.Stats(profile).total_calls

    assert calls(ours(1)) - calls(step) <= 700 + 95 * len(list(network.parameters()))
