"""Random invalid calls: public functions raise and change nothing, and the raw operators never crash."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from against_dense import Target
from fuzzing import number_of, run_cases
from processes import run_python
from test_fuzz import OPERATORS, Call, Random, described, drawn_partition, same
from torch import Tensor

import partkernels as pk

CPU = Target("cpu", "cpu")
# Errors that a wrong call may raise; `embedding` raises IndexError like torch.
ERRORS = (ValueError, TypeError, RuntimeError, IndexError)


def wrong(draw: Random) -> None:
    """Check that a call with one wrong argument raises with a message and leaves all tensors unchanged."""
    name = draw.choice(list(OPERATORS))
    call = OPERATORS[name](draw)
    draw.say(str(call))
    argument, value = draw.choice(list(wrong_arguments(draw, call)))
    arguments = call.arguments | {argument: value}
    tensors = [value for value in arguments.values() if isinstance(value, Tensor) and not value.is_meta]
    before = [tensor.clone() for tensor in tensors]
    given = f"{name} with {argument}={described(value)}"
    try:
        with pk.use_backend(draw.choice(("reference", CPU.backend))):
            call.function(**arguments)
    except ERRORS as error:
        assert str(error).strip(), given
    else:
        raise AssertionError(f"{given} was accepted")
    assert all(map(same, tensors, before)), f"{given} has changed a tensor"


def wrong_arguments(draw: Random, call: Call) -> Iterator[tuple[str, Any]]:
    """Yield each argument of a call with invalid values."""
    a = call.arguments
    partition, update = a["partition"], a["update"]
    for name, value in a.items():
        if isinstance(value, Tensor):
            # The dimension of the channels, for images.
            channels = 1 - a["weight"].dim() if name == "x" else -1
            yield from wrong_tensors(name, value, channels)
    if partition is not None:
        shape, count = partition.shape, partition.count
        for other in ((*shape, 2), (shape[0] + 1, *shape[1:])):
            yield "partition", drawn_partition(draw, other)
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
    if "step" in a:
        yield from (("step", wrong) for wrong in (0, -1, 1.5, True, None))
        yield from (("betas", wrong) for wrong in ((0.9, 1.0), (0.9,), (-1, 0.5), None, 0.9))
        yield from (("exp_avg", wrong) for wrong in (a["exp_avg_sq"], a["grad"], a["parameter"], None))
    elif "lr" in a and a["momentum"]:
        yield from (("momentum_buffer", wrong) for wrong in (None, a["parameter"], a["grad"]))
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
    yield name, value.to("meta")
    if name != "ids":
        yield name, torch.cat([value, value], dim)
        yield name, value.flatten()[:0]


# The operators below the public functions, torch.ops.partkernels, check only memory safety.

# Not spoilt: only the public function checks that ids of an embedding are in range.
UNSPOILT = {"ids"}


def raw(draw: Random) -> None:
    """Call an operator with invalid arguments: it may return or raise, but must not crash."""
    name = draw.choice(["linear", "conv2d", "embedding", "subnetwork_weight", "sgd_step", "adam_step"])
    operator, arguments = raw_call(draw, name)
    names = [argument.name for argument in operator._schema.arguments]
    for _ in range(draw.choice((1, 1, 2))):
        i = draw.choice([i for i, name in enumerate(names) if name not in UNSPOILT])
        arguments[i] = spoilt(draw, arguments[i])
    told = ", ".join(f"{name}={described(value)}" for name, value in zip(names, arguments, strict=True))
    draw.say(f"{operator}({told})")
    with contextlib.suppress(Exception):
        operator(*arguments)


def raw_call(draw: Random, name: str) -> tuple[torch._ops.OpOverload, list[Any]]:
    """Return one of the operators behind a public function, with valid arguments."""
    a = OPERATORS[name](draw).arguments
    partition = a["partition"]
    if name.endswith("_step"):
        entries = ([None], [1], 1) if partition is None else ([partition.map], [partition.count], a["update"])
        if name == "sgd_step":
            lists = [a["parameter"]], [a["grad"]], [] if a["momentum_buffer"] is None else [a["momentum_buffer"]]
            numbers = a["lr"], a["momentum"], a["weight_decay"], a["nesterov"]
        else:
            lists = ([a[tensor]] for tensor in ("parameter", "grad", "exp_avg", "exp_avg_sq"))
            numbers = [a["step"]], a["lr"], *a["betas"], 1e-8, a["weight_decay"], a["decoupled"]
        return getattr(torch.ops.partkernels, f"{name}s").default, [*lists, *entries, *numbers, CPU.backend]
    weight, active, update = a["weight"], a["active"], a["update"] or a["active"]
    flat, owners = partition.flat(), (partition.map, partition.count)
    if name == "embedding":
        found = {name: (weight, a["ids"].long(), -1, active, update, *flat)}
    elif name == "subnetwork_weight":
        found = {name: (weight, active, *flat), "subnetwork_weight_grad": (weight, 1, active, *owners)}
    elif name == "linear":
        x, grad = a["x"], draw.randn((*a["x"].shape[:-1], len(weight)), weight.dtype)
        found = {
            name: (x, weight, a["bias"], active, update, *flat),
            "linear_grad_input": (grad, weight, active, update, *flat),
            "linear_grad_weight": (grad, x, update, *owners),
            "grad_bias": (grad, -1, update, partition.count),
        }
    else:
        x = a["x"] if a["x"].dim() == 4 else a["x"][None]
        size, kernel = x.shape[2:], weight.shape[2:]
        pads = {"same": 0, "valid": 0}.get(a["padding"], a["padding"])
        lists = [[n, n] if isinstance(n, int) else list(n) for n in (a["stride"], pads, a["dilation"])]
        made = (
            max(1, (n + 2 * p - d * (k - 1) - 1) // s + 1) for n, k, s, p, d in zip(size, kernel, *lists, strict=True)
        )
        grad, geometry = draw.randn((len(x), len(weight), *made), weight.dtype), (*lists, a["groups"])
        found = {
            name: (x, weight, a["bias"], *geometry, active, update, *flat),
            "conv2d_grad_input": (grad, weight, list(x.shape), *geometry, active, update, *flat),
            "conv2d_grad_weight": (grad, x, list(kernel), *geometry, update, *owners),
        }
    one = draw.choice(list(found))
    return getattr(torch.ops.partkernels, one).default, [*found[one], CPU.backend]


def spoilt(draw: Random, value: Any) -> Any:
    """Return an invalid value of about the same type."""
    if isinstance(value, Tensor):
        tensor = value if value.dim() else value[None]
        return draw.choice([
            tensor[:0], tensor[: len(tensor) // 2], tensor[..., : tensor.shape[-1] // 2], tensor.flatten(),
            tensor[None], tensor.transpose(0, -1), tensor.double(), tensor.to(torch.uint8), tensor.to("meta"),
            torch.tensor(1.0),
        ])  # fmt: skip
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice((0, -1, value + 1, value - 1, 300, 2**31, 2**62, -(2**62)))
    if isinstance(value, float):
        return draw.choice((float("nan"), float("inf"), -1.0, 0.0, 1e300))
    if isinstance(value, str):
        return draw.choice(("stored", "zeros", "uniform", "nonsense", "", "reference", "cuda"))
    if isinstance(value, list) and any(isinstance(one, Tensor) for one in value):
        return draw.choice(([], 2 * value, [spoilt(draw, one) for one in value]))
    if isinstance(value, list):
        return draw.choice(([], value[:-1], *([n] * len(value) for n in (0, -1, 2**31, 2**62))))
    return draw.choice((None, 1, draw.randn((3,))))


def test_wrong_calls_raise_and_change_nothing():
    run_cases(wrong, number_of(200, of_calls=0.5), functools.partial(Random, target=CPU))


def test_raw_operators_do_not_crash():
    """Call them in a separate process, so that a crash can be reported with its last case."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ["PYTHONPATH"]])
    command = [__file__, str(number_of(200, of_calls=0.5))]
    done = run_python(*command, environment=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, f"{done.stdout.splitlines()[-2:]} ended with {done.returncode}: {done.stderr[:2000]}"


if __name__ == "__main__":
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    Random.say = staticmethod(functools.partial(print, flush=True))
    for seed in range(int(sys.argv[1])):
        raw(Random(seed, CPU))
