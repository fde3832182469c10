"""Optimiser steps on one partition: each backend against torch.optim; all other entries keep their bits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from against_dense import (
    BACKENDS,
    DTYPES,
    EVERY,
    INTERPRETED,
    LAYOUTS,
    Target,
    assert_within_twice_dense_error,
    in_layout,
)
from pairwise import pairwise
from torch import Tensor

import partkernels as pk

BITS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}


@dataclass
class Step:
    """An optimiser's step by torch and by partkernels with the same arguments."""

    optimizer: type[torch.optim.Optimizer]
    moments: tuple[str, ...] = ()
    number: int = 1
    arguments: dict = field(default_factory=dict)

    def tensors(self, target: Target, shape: tuple[int, ...], dtype: torch.dtype, layout="contiguous") -> list[Tensor]:
        """Return random tensors: parameter, gradient and moments."""
        tensors = [target.randn(shape) for _ in range(2 + len(self.moments))]
        if "exp_avg_sq" in self.moments:
            tensors[-1] = tensors[-1].square() + 0.1  # near 0, the square root would magnify rounding
        return [in_layout(tensor.to(dtype), layout) for tensor in tensors]

    def ours(self, tensors: list[Tensor], partition: pk.Partition | None, update: int | None) -> None:
        if self.optimizer is torch.optim.SGD:
            parameter, grad, *buffer = tensors
            pk.sgd_step(parameter, grad, buffer[0] if buffer else None, partition, update, **self.arguments)
        else:
            decoupled = self.optimizer is torch.optim.AdamW
            pk.adam_step(*tensors, partition, update, step=self.number, decoupled=decoupled, **self.arguments)

    def of_all(
        self, each: list[list[Tensor]], partitions: list[pk.Partition | None], update: int | None, later: int = 0
    ) -> None:
        """Step several parameters in one call; the first ones have taken `later` steps more."""
        lists = [list(column) for column in zip(*each, strict=True)]
        if self.optimizer is torch.optim.SGD:
            parameters, grads, *buffers = lists
            pk.sgd_steps(parameters, grads, buffers[0] if buffers else [], partitions, update, **self.arguments)
        else:
            steps = [self.number + later * (2 * i < len(each)) for i in range(len(each))]
            decoupled = self.optimizer is torch.optim.AdamW
            pk.adam_steps(*lists, partitions, update, steps=steps, decoupled=decoupled, **self.arguments)

    def torchs(self, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Return the tensors after torch's step on every entry, computed in a dtype."""
        parameter, grad, *moments = (tensor.to(dtype, copy=True).contiguous() for tensor in tensors)
        parameter.requires_grad_().grad = grad
        optimizer = self.optimizer([parameter], **self.arguments)
        state = dict(zip(self.moments, moments, strict=True))
        optimizer.state[parameter].update(state, step=torch.tensor(self.number - 1.0))
        optimizer.step()
        return [parameter.detach(), grad, *moments]


BUFFER, MOMENTS = ("momentum_buffer",), ("exp_avg", "exp_avg_sq")
DECAY = {"lr": 0.1, "weight_decay": 0.2}
STEPS = {
    "sgd": Step(torch.optim.SGD, arguments={"lr": 0.1}),
    "sgd, decay": Step(torch.optim.SGD, arguments=DECAY),
    "momentum": Step(torch.optim.SGD, BUFFER, arguments={"lr": 0.1, "momentum": 0.9}),
    "nesterov, decay": Step(torch.optim.SGD, BUFFER, arguments={**DECAY, "momentum": 0.9, "nesterov": True}),
    "adam": Step(torch.optim.Adam, MOMENTS, 7, {"lr": 0.01}),
    "adam, decay": Step(torch.optim.Adam, MOMENTS, 1, {**DECAY, "betas": (0.5, 0.8), "eps": 1e-3}),
    "adamw": Step(torch.optim.AdamW, MOMENTS, 3, DECAY),
}
every_step = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
SHAPES = [(7,), (1, 1), (5, 300), (3, 16), (40, 2100), (6, 5, 3), (4, 300, 3, 2), (6, 1, 3, 3), (3, 4, 2, 2, 3)]
WRITABLE = [layout for layout in LAYOUTS if layout != "expanded"]
# When interpreted, one dtype is enough for these.
SLOW = [(5, 300), (40, 2100), (4, 300, 3, 2)]


def check(step: Step, tensors: list[Tensor], partition: pk.Partition, update: int, target: Target) -> None:
    """Compare our step on the partition's entries with torch's."""
    before = [tensor.clone() for tensor in tensors]
    with target.use():
        step.ours(tensors, partition, update)
    mask = partition.mask(update)
    for i, (old, new) in enumerate(zip(before, tensors, strict=True)):
        assert torch.equal(new[~mask], old[~mask]), "another partition's entries have changed"
        if i == 1:
            assert torch.equal(new, old), "the gradient has changed"
            continue
        # Compare with the error of torch's complete step, not only with this partition's few entries.
        truth = step.torchs(before, torch.float64)[i]
        ours = torch.where(mask, new, truth.to(new.dtype))
        assert_within_twice_dense_error(ours, lambda dtype, i=i: step.torchs(before, dtype)[i])


@pairwise(
    lambda step, shape, dtype, target, *_: (
        target.backend not in INTERPRETED or dtype == torch.bfloat16 or shape not in SLOW
    ),
    step=STEPS,
    shape=SHAPES,
    dtype=DTYPES,
    target=EVERY,
    count=[2, 3, 5, 40],
    layout=WRITABLE,
    which=["all", 0, 1, -1],
)
def test_a_partition_moves_as_torchs_optimiser_moves_it(step, shape, dtype, target, count, layout, which):
    partition = pk.Partition.random(shape, [1 / count] * count, seed=2).to(target.device)
    tensors = step.tensors(target, shape, dtype, layout if which == "all" else "contiguous")
    if which != "all":
        tensors[which] = in_layout(tensors[which], layout)
    check(step, tensors, partition, 2, target)


@pairwise(
    step=STEPS,
    shape=[(9, 300), (5, 33, 3, 3)],
    layout=["contiguous", "transposed", "channels_last"],
    dtype=DTYPES,
    target=EVERY,
)
def test_other_partitions_keep_every_bit_of_nans_and_infinities(step, shape, layout, dtype, target):
    partition = pk.Partition.random(shape, (0.5, 0.4, 0.1), seed=5).to(target.device)
    mask = partition.mask(3)
    limits = torch.iinfo(BITS[dtype])
    tensors = step.tensors(target, shape, dtype)
    for i, tensor in enumerate(tensors):  # all kinds of infinities and NaNs, also in the gradient
        noise = torch.randint(limits.min, limits.max, shape, dtype=BITS[dtype], device=target.device)
        nans = torch.full(shape, torch.nan, dtype=dtype, device=target.device).view(BITS[dtype]) | noise
        noise = torch.where(noise % 2 == 0, noise, nans)
        tensors[i] = in_layout(torch.where(mask, tensor.view(BITS[dtype]), noise), layout).view(dtype)
    before = [tensor.clone().view(BITS[dtype]) for tensor in tensors]
    with target.use():
        step.ours(tensors, partition, 3)
    for old, new in zip(before, tensors, strict=True):
        assert torch.equal(new.view(BITS[dtype])[~mask], old[~mask])
        assert new[mask].isfinite().all()


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_an_infinite_parameter_has_a_finite_state_unless_it_decays(decay, backend):
    parameter, exp_avg, exp_avg_sq = torch.tensor([[torch.inf], [0.0], [0.0]]).unbind()
    with pk.use_backend(backend):
        pk.adam_step(parameter, torch.ones(1), exp_avg, exp_avg_sq, None, None, step=1, lr=0.1, weight_decay=decay)
    assert exp_avg.isfinite().all() == (decay == 0)


@pytest.mark.parametrize("target", EVERY)
@pytest.mark.parametrize(("beta", "dtype"), [(0.0, torch.float32), (0.25, torch.float64), (0.0, torch.float64)])
def test_a_mean_that_forgets_is_as_near_the_gradient_as_torchs(beta, dtype, target):
    grad, exp_avg = 1e-8 * torch.randn(40).to(target.device, dtype), torch.ones(40, dtype=dtype, device=target.device)
    expected = exp_avg.double().lerp(grad.double(), 1 - beta)
    with target.use():
        pk.adam_step(
            torch.zeros_like(grad), grad, exp_avg, torch.zeros_like(grad), None, None, step=1, lr=0.1, betas=(beta, 0.9)
        )
    torch.testing.assert_close(exp_avg.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=0.0)


SHAPES = [(), (7,), (5, 300), (66, 520), (6, 5, 3), (3, 4, 2, 5), (2, 3, 1, 2), (2, 3, 4, 2, 2), (0, 3)]


@pairwise(step=STEPS, layout=LAYOUTS[:3], target=EVERY)
def test_stepping_several_parameters_at_once_equals_separate_calls(step, layout, target):
    dtypes = [torch.float32, torch.bfloat16] if target.device == "cpu" else DTYPES
    each, partitions = [], []
    for i, shape in enumerate(SHAPES):
        divides = len(shape) > 1 and 0 not in shape
        proportions = (0.5, 0.3, 0.2) if i % 2 else (0.125,) * 8  # maps of 2 and of 4 bits
        random = pk.Partition.random(shape, proportions, seed=i).to(target.device) if divides else None
        nested = pk.Partition.nested(shape, rows=(2, 4, shape[0])) if shape and shape[0] > 4 else None
        for partition in {random, nested}:
            for dtype in dtypes:
                tensors = step.tensors(target, shape, dtype, layout if len(shape) > 1 else "contiguous")
                if len(shape) == 5:
                    tensors[1] = in_layout(tensors[1], "transposed")
                each.append(tensors)
                partitions.append(partition)
    alone = [[tensor.clone() for tensor in tensors] for tensors in each]
    with target.use():
        step.of_all(each, partitions, 2, later=1000)
        for i, (tensors, partition) in enumerate(zip(alone, partitions, strict=True)):
            later = 1000 * (2 * i < len(each))
            replace(step, number=step.number + later).ours(tensors, partition, 2)
    for one, other in zip(each, alone, strict=True):
        assert all(map(torch.equal, one, other))


@every_step
def test_invalid_tensors_among_several_raise_before_any_change(step):
    each = [step.tensors(Target("cpu", "cpu"), (4, 5), torch.float32) for _ in range(3)]
    before = [[tensor.clone() for tensor in tensors] for tensors in each]
    spoilt = [[*tensors] for tensors in each]
    spoilt[2][1] = spoilt[2][1].t()
    with pytest.raises(ValueError, match=r"grad has shape \(5, 4\) and the parameter \(4, 5\)"):
        step.of_all(spoilt, [None] * 3, None)
    with pytest.raises(ValueError, match="2 partitions for 3 parameters; pass one for each"):
        step.of_all(each, [None] * 2, None)
    with pytest.raises(ValueError, match="parameter and parameter share memory"):
        step.of_all([each[0], [each[0][0], *each[1][1:]]], [None] * 2, None)
    for one, other in zip(each, before, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@every_step
def test_autograd_raises_if_a_step_changed_a_saved_tensor(step, backend):
    tensors = step.tensors(Target(backend, "cpu"), (3, 4), torch.float32)
    parameter = tensors[0].requires_grad_()
    y = (parameter * parameter).sum()
    with pk.use_backend(backend):
        step.ours(tensors, None, None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.cases(usual=4)
@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@every_step
def test_compiles_without_a_graph_break(step, backend):
    partition = pk.Partition.random((4, 2, 3, 3), (0.5, 0.5), seed=2)
    tensors = step.tensors(Target(backend, "cpu"), (4, 2, 3, 3), torch.float32)
    twins = [tensor.clone() for tensor in tensors]
    tensors[0].requires_grad_()
    torch._dynamo.reset()  # each case recompiles the same function; the limit is eight
    with pk.use_backend(backend):
        step.ours(twins, partition, 2)
        torch.compile(step.ours, fullgraph=True, backend="aot_eager")(tensors, partition, 2)
    assert all(map(torch.equal, twins, tensors))


@pytest.mark.full
def test_a_compiled_adam_is_not_compiled_again_for_every_step():
    compilations = 0

    def counting(graph, _):
        nonlocal compilations
        compilations += 1
        return graph

    @torch.compile(fullgraph=True, backend=counting)
    def compiled(tensors, step):
        pk.adam_step(*tensors, None, None, step=step, lr=0.1)

    for step in range(1, 8):
        compiled(list(torch.zeros(4, 3).unbind()), step)
    assert compilations <= 3  # for step=1, for step=2, and one with a symbolic step


def test_interleaved_tensors_in_one_memory_are_stepped():
    tensors = torch.rand(3, 4, 4).unbind(-1)
    twins = [tensor.clone() for tensor in tensors]
    STEPS["adam"].ours(twins, None, None)
    STEPS["adam"].ours(tensors, None, None)
    assert all(map(torch.equal, twins, tensors))
