"""Random invalid calls raise and change nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from against_dense import Target
from fuzzing import number_of, run_cases
from test_fuzz import OPERATORS, Call, Random, described, drawn_partition, same
from torch import Tensor

import partkernels as pk

CPU = Target("cpu", "cpu")
# Errors that a wrong call may raise; `embedding` raises IndexError like torch.
ERRORS = (ValueError, TypeError, RuntimeError, IndexError)


def wrong(draw: Random, name: str) -> None:
    """Check that each call with one wrong argument raises with a message and leaves all tensors unchanged."""
    call = OPERATORS[name](draw)
    draw.say(str(call))
    tensors = [value for value in call.arguments.values() if isinstance(value, Tensor)]
    before = [tensor.clone() for tensor in tensors]
    for argument, value in wrong_arguments(draw, call):
        given = f"{name} with {argument}={described(value)}"
        try:
            with pk.use_backend(draw.choice(("reference", CPU.backend))):
                call.function(**call.arguments | {argument: value})
        except ERRORS as error:
            assert str(error).strip(), given
        else:
            raise AssertionError(f"{given} was accepted")
        assert all(map(same, tensors, before)), f"{given} has changed a tensor"


def wrong_arguments(draw: Random, call: Call) -> Iterator[tuple[str, Any]]:
    """Yield each argument of a call with invalid values."""
    a = call.arguments
    partition, update = a["partition"], a["update"]
    is_nested = isinstance(partition, pk.NestedPartition)  # has no tensors, so any device
    for name, value in a.items():
        if isinstance(value, Tensor):
            # The dimension of the channels, for images.
            channels = 1 - a["weight"].dim() if name == "x" else -1
            yield from wrong_tensors(name, value, channels)
            if not (is_nested and call.function is pk.subnetwork_weight):
                yield name, value.to("meta")
    if partition is not None:
        shape, count = partition.shape, partition.num_partitions
        for other in ((*shape, 2), (shape[0] + 1, *shape[1:])):
            yield "partition", drawn_partition(draw, other)
        if not is_nested:
            yield "partition", partition.to("meta")
        yield from (("update", wrong) for wrong in (0, -1, count + 1, True, 1.5, "1", 2**70))
    if "active" in a:
        yield from (("active", wrong) for wrong in (0, -1, count + 1, True, 1.5, "1", None, 2**70))
        yield from [("update", a["active"] + 1)]
        yield from [("active", update - 1)] if update else ()
    for name, least in {"stride": 1, "dilation": 1, "padding": 0, "output_padding": 0}.items():
        if name in a:
            yield from ((name, wrong) for wrong in (least - 1, (1, 1, 1), 1.5, "full", None, (-1, -1), ()))
    if "groups" in a:
        yield from (("groups", wrong) for wrong in (0, -1, a["weight"].shape[0] + 1, 1.5, None))
    if "lr" in a:
        yield "grad", None
        yield from (("lr", wrong) for wrong in (-0.1, float("nan"), float("inf"), None, "1"))
        yield from (("weight_decay", wrong) for wrong in (-0.1, float("nan")))
        if a["parameter"].numel() > 1:
            yield "parameter", a["parameter"].new_zeros(()).expand(a["parameter"].shape)
        if partition is not None:
            yield "update", None
    # A nested partition without entries steps nothing, so that shared memory does no harm.
    is_empty = is_nested and "lr" in a and partition.sizes()[update - 1] == 0
    if "step" in a:
        yield from (("step", wrong) for wrong in (0, -1, 1.5, True, None))
        yield from (("betas", wrong) for wrong in ((0.9, 1.0), (0.9,), (-1, 0.5), None, 0.9))
        yield "exp_avg", None
        yield from [] if is_empty else (("exp_avg", a[name]) for name in ("exp_avg_sq", "grad", "parameter"))
    elif "lr" in a and a["momentum"]:
        yield "momentum_buffer", None
        yield from [] if is_empty else (("momentum_buffer", a[name]) for name in ("parameter", "grad"))
    if "ids" in a:
        rows = len(a["weight"])
        yield from (("padding_idx", wrong) for wrong in (rows, -rows - 1, 0.5))
        yield from (("ids", torch.tensor([0, wrong])) for wrong in (rows, -1, 2**62))


def wrong_tensors(name: str, value: Tensor, dim: int) -> Iterator[tuple[str, Any]]:
    """Yield tensors of another dtype, device or shape; `dim` is a dimension of fixed size."""
    for dtype in (torch.int16, torch.complex64, torch.bool):
        yield name, value.to(dtype)
    if name not in ("weight", "parameter"):
        yield name, value.half()
    if name != "ids":
        yield name, torch.cat([value, value], dim)
        yield name, value.flatten()[:0]


@pytest.mark.parametrize("name", OPERATORS)
def test_wrong_calls_raise_and_change_nothing(name):
    count = number_of(10, of_calls=0.05)
    run_cases(functools.partial(wrong, name=name), count, functools.partial(Random, target=CPU))
