"""Random calls of every operator on every backend, compared with dense PyTorch in float64.

Memory is poisoned, and inactive entries are NaN. To add an operator, add a function marked `@operator` that draws a
call. See tests/fuzzing.py for the number of calls, and test_fuzz_wrong.py for invalid calls.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_dense import COMPILED, DTYPES, LAYOUTS, TARGETS, Target, compare, in_layout
from fuzzing import Draw, number_of, run_cases
from torch import Tensor

import partkernels as pk
from partkernels.arguments import sizes
from partkernels.testing import Yardstick, poisoned_memory

WRITABLE = [layout for layout in LAYOUTS if layout != "expanded"]
# In results with at most this many entries, the dense operator's error is too random for a comparison.
FEW = 2000


class Random(Draw):
    """Random choices for a target; interpreted kernels get small tensors."""

    def __init__(self, seed: int, target: Target) -> None:
        super().__init__(seed)
        torch.manual_seed(self.getrandbits(63))  # of the gradients that `compare` draws
        self.target = target
        self.is_quick = target in COMPILED or target.backend == "reference"
        self.dtypes = [*DTYPES, torch.float16] if target.backend == "triton" else DTYPES

    def size(self, most: int = 130) -> int:
        return super().size(most if self.is_quick else min(most, 40))

    def randn(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return super().randn(shape, dtype).to(self.target.device)

    @contextmanager
    def machine(self) -> Iterator[None]:
        """Use the target, with poisoned memory, any number of threads, and any workspace of its convolutions."""
        threads, has_workspace = torch.get_num_threads(), self.target.backend == "cpu"
        torch.set_num_threads(self.choice((1, 1, 1, 3)))
        if has_workspace:
            limit_workspace = torch.ops.partkernels_cpu.limit_workspace
            workspace = limit_workspace(0)
            limit_workspace(self.choice((workspace, workspace, workspace, 0, 100, 20_000)))
        try:
            with self.target.use(), poisoned_memory():
                yield
        finally:
            if has_workspace:
                limit_workspace(workspace)
            torch.set_num_threads(threads)


@dataclass
class Call:
    """An operator, its arguments by name, and a check of its results."""

    function: Callable
    arguments: dict[str, Any]
    check: Callable[[Random, Call], None]

    def __str__(self) -> str:
        told = ", ".join(f"{name}={described(value)}" for name, value in self.arguments.items())
        return f"{self.function.__name__}({told})"


def described(value: Any) -> str:
    if isinstance(value, pk.Partition) and isinstance(value.defaults, pk.Stored):
        return f"Partition(num_partitions={value.num_partitions}, defaults=Stored({described(value.defaults.tensor)}))"
    if not isinstance(value, Tensor):
        return str(value)
    return f"{value.dtype} {list(value.shape)} strides {value.stride()}{' negated' * value.is_neg()}"


OPERATORS: dict[str, Callable[[Random], Call]] = {}


def operator(draws: Callable[[Random], Call]) -> Callable[[Random], Call]:
    OPERATORS[draws.__name__] = draws
    return draws


# Random arguments: partitions, layouts, geometries.


def drawn_proportions(draw: Random) -> list[float]:
    """Draw C = 1 to 256 proportions, some of them 0."""
    count = draw.choice((1, 2, 2, 3, 3, 4, 5, 16, 17, 200, 255, 256))
    shares = [draw.choice((0, 1, 1, 5, draw.random())) for _ in range(count)]
    shares[draw.randrange(count)] = 1
    return [share / sum(shares) for share in shares]


def drawn_defaults(draw: Random, shape: tuple[int, ...], dtype: torch.dtype) -> pk.Defaults:
    seed, stream = draw.getrandbits(draw.choice((3, 33, 63))), draw.getrandbits(draw.choice((1, 40, 63)))
    return draw.choice([
        pk.Zeros(),
        pk.Uniform(draw.choice((0.5, 1e-30, 3)), seed, stream),
        pk.Normal(draw.choice((0.1, 1.0)), seed, stream),
        pk.Stored(in_layout(draw.randn(shape, dtype).cpu(), draw.choice(LAYOUTS))),
    ])  # fmt: skip


def drawn_partition(draw: Random, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> pk.Partition:
    """Draw a partition, or a shard of a larger one."""
    if draw.chance(0.2):
        start = draw.size(20)
        whole = drawn_partition(draw, (start + shape[0] + draw.randint(0, 2), *shape[1:]), dtype)
        return whole.rows(start, start + shape[0])
    if len(shape) > 1 and all(size == 1 for size in shape[2:]) and draw.chance(0.1):
        whole = drawn_partition(draw, (shape[0], 64 + shape[1] + draw.randint(0, 2), *shape[2:]), dtype)
        return whole.columns(64, 64 + shape[1])
    if draw.chance(0.1):
        ends = [sorted(draw.randint(0, size) for _ in range(2)) for size in shape[:2]]
        return pk.Partition.nested(shape, *((*some, size) for some, size in zip(ends, shape, strict=False)))
    defaults, proportions = drawn_defaults(draw, shape, dtype), drawn_proportions(draw)
    if draw.chance(0.7):
        one = pk.Partition.random(shape, proportions, seed=draw.getrandbits(63), defaults=defaults)
    else:
        count = min(len(proportions), 255)
        ids = torch.randint(1, count + 1, shape, dtype=torch.uint8, generator=draw.generator)
        one = pk.Partition.from_ids(in_layout(ids, draw.choice(WHOLE)), num_partitions=count, defaults=defaults)
    return one.to(draw.target.device)


# Layouts of integer tensors, which have no NaNs and no negated views.
WHOLE = ["contiguous", "transposed", "expanded", "channels_last"]


def drawn_weight(draw: Random, shape: tuple[int, ...]) -> dict[str, Any]:
    """Draw a weight, its partition, `active` and `update`."""
    dtype = draw.choice(draw.dtypes)
    partition = drawn_partition(draw, shape, dtype)
    active = draw.randint(1, partition.num_partitions)
    update = draw.choice((None, active, draw.randint(1, active)))
    weight, layout = draw.randn(shape, dtype), draw.choice(LAYOUTS)
    if layout != "expanded" and draw.chance(0.5):  # no result may depend on inactive entries
        weight[partition.ids() > active] = torch.nan
    return {"weight": in_layout(weight, layout), "partition": partition, "active": active, "update": update}


def drawn_bias(draw: Random, out: int, dtype: torch.dtype, count: int) -> Tensor | None:
    """Draw a bias: None, a vector, or one row per partition."""
    shape = draw.choice((None, (out,), (count, out)))
    return None if shape is None else in_layout(draw.randn(shape, dtype), draw.choice(LAYOUTS))


def a_few(dims: int, numbers: list[int]) -> int | tuple[int, ...]:
    """Return the numbers of a geometry, as a single int if they are equal."""
    return numbers[0] if len(set(numbers)) == 1 else tuple(numbers)


# Comparison of results.


@contextmanager
def without_onednn() -> Iterator[None]:
    """Disable oneDNN's convolutions (see docs/torch-faults.md); torch.backends.mkldnn.flags would warn."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def assert_near(got: Tensor, compute: Callable[[torch.dtype], Tensor], terms: Callable[[], Tensor]) -> None:
    """Check a result by the tolerance rule, or by the usual error bound of a sum.

    The bound may replace the rule for the largest error, and for all errors if the result has few entries.

    Args:
        compute: a function that returns the dense result in a dtype.
        terms: a function that returns for each entry the sum of the absolute values of its terms.
    """
    with without_onednn():
        yardstick, most = Yardstick(compute, got.dtype), terms()
    try:
        yardstick.check(got)
    except AssertionError:
        if got.shape != most.shape:
            raise
        errors, eps = (got.double() - yardstick.truth).abs(), torch.finfo(got.dtype).eps
        # Bias rows are added sequentially in float64, so the errors of similar rows accumulate.
        of_sums = 20 * eps if got.dtype == torch.float64 else 4 * torch.finfo(torch.float32).eps
        usual = eps * yardstick.truth.abs() + of_sums * most
        is_luck = got.numel() <= FEW or errors.square().mean().sqrt() <= yardstick.allowed[1]
        if not (is_luck and (errors <= usual).all()):
            raise


def check_product(draw: Random, call: Call) -> None:
    if isinstance(call.arguments["partition"], pk.NestedPartition) and not call.arguments["x"].numel():
        return  # autograd then has no gradient of x, where PyTorch has an empty one
    with draw.machine():
        compare(call.function, call.arguments, draw.target, draw.choice(LAYOUTS), assert_near)


# The operators.


@operator
def linear(draw: Random) -> Call:
    # Sizes that use several threads are rare.
    out, features = draw.size(), draw.size()
    if draw.is_quick and draw.chance(0.1):
        out, features = draw.randint(200, 300), draw.randint(150, 300)
    arguments = drawn_weight(draw, (out, features))
    dtype, count = arguments["weight"].dtype, arguments["partition"].num_partitions
    before = draw.choice(((), (draw.choice((0, draw.size(40))),), (draw.randint(1, 3), draw.size(20))))
    x = in_layout(draw.randn((*before, features), dtype), draw.choice(LAYOUTS))
    arguments |= {"x": x, "bias": drawn_bias(draw, out, dtype, count)}
    return Call(pk.linear, arguments, check_product)


def drawn_images(draw: Random, dims: int, is_transposed: bool) -> dict[str, Any]:
    """Draw the arguments of a convolution."""
    groups = draw.choice((1, 1, 1, 2, 3, draw.size(17)))
    first, second = draw.size(70 // groups), draw.size(70 // groups)
    kernel = [draw.choice((1, 1, 2, 3, 3, 4, 5, 7)) for _ in range(dims)]
    weight = drawn_weight(draw, (first * groups, second, *kernel))
    dtype, count = weight["weight"].dtype, weight["partition"].num_partitions
    taken, made = (first * groups, second * groups) if is_transposed else (second * groups, first * groups)
    stride = [draw.choice((1, 1, 2, 3, 7)) for _ in range(dims)]
    dilation = [draw.choice((1, 1, 2, 3)) for _ in range(dims)]
    padding = [draw.choice((0, 0, 1, 2, 8)) for _ in range(dims)]
    images, more = [], {}
    if is_transposed:
        output_padding = [draw.randrange(n) for n in map(max, stride, dilation)]
        for s, p, d, k, o in zip(stride, padding, dilation, kernel, output_padding, strict=True):
            least = max(1, -((d * (k - 1) + o - 2 * p) // s) + 1)
            images.append(least + draw.choice((0, 1, 4, draw.size(12))))
        more = {"padding": a_few(dims, padding), "output_padding": a_few(dims, output_padding)}
    else:
        same = draw.choice((None, None, None, "same", "valid"))
        stride = [1] * dims if same == "same" else stride
        padding = [0] * dims if same else padding
        for p, d, k in zip(padding, dilation, kernel, strict=True):
            least = 1 if same == "same" else max(1, d * (k - 1) + 1 - 2 * p)
            images.append(least + draw.choice((0, 1, 4, draw.size(17))))
        more = {"padding": same or a_few(dims, padding)}
    batch = draw.choice(((), (0,), (1,), (2,), (3,), (draw.size(9),)))
    x = in_layout(draw.randn((*batch, taken, *images), dtype), draw.choice(LAYOUTS))
    return weight | more | {
        "x": x, "bias": drawn_bias(draw, made, dtype, count), "stride": a_few(dims, stride),
        "dilation": a_few(dims, dilation), "groups": groups,
    }  # fmt: skip


for function in (pk.conv1d, pk.conv2d, pk.conv_transpose1d, pk.conv_transpose2d):
    OPERATORS[function.__name__] = lambda draw, function=function, name=function.__name__: Call(
        function, drawn_images(draw, int(name[-2]), "transpose" in name), check_product
    )


@operator
def embedding(draw: Random) -> Call:
    rows, features = draw.choice(((draw.size(), draw.size()),) * 6 + ((3, 700), (300, 5), (300, 200)))
    shape = draw.choice(((), (0,), (draw.size(),), (2, draw.size(20)), (2, 3, 1), (501,)))
    ids = torch.randint(rows, shape, dtype=draw.choice((torch.int32, torch.int64)), generator=draw.generator)
    if ids.dim():
        ids = in_layout(ids, draw.choice(WHOLE))
    ids = ids.to(draw.target.device)
    padding = {"padding_idx": draw.choice((None, draw.randrange(-rows, rows)))}
    return Call(pk.embedding, drawn_weight(draw, (rows, features)) | {"ids": ids} | padding, check_embedding)


def check_embedding(draw: Random, call: Call) -> None:
    a = call.arguments
    weight, ids, partition, update = a["weight"].detach().requires_grad_(), a["ids"], a["partition"], a["update"]
    with pk.use_backend("reference"):
        subnetwork = pk.subnetwork_weight(weight, partition, a["active"])
    with draw.machine():
        y = pk.embedding(**a | {"weight": weight})
        assert torch.equal(y, subnetwork[ids.long()])
        grad = in_layout(draw.randn(y.shape, y.dtype), draw.choice(LAYOUTS) if ids.dim() else "contiguous")
        got = torch.autograd.grad(y, weight, grad, allow_unused=True)[0] if y.requires_grad else None
    if update is None:
        assert got is None
        return
    table = subnetwork.requires_grad_()
    (dense,) = torch.autograd.grad(F.embedding(ids.long(), table, a["padding_idx"]), table, grad)
    assert torch.equal(got, torch.where(partition.mask(update), dense, 0))


@operator
def subnetwork_weight(draw: Random) -> Call:
    return Call(pk.subnetwork_weight, drawn_weight(draw, drawn_shape(draw)), check_subnetwork_weight)


def drawn_shape(draw: Random) -> tuple[int, ...]:
    """Draw a weight's shape with 1 to 5 dimensions; some are narrow, and few are large enough for several threads."""
    return draw.choice([
        (draw.size(),), (draw.size(), 1), (1, draw.size()), (draw.size(), draw.size()), (1, draw.randint(300, 3000)),
        (draw.size(20), draw.size(20), 3), (draw.size(20), draw.size(20), 3, 2), (1, 1, 5, 5), (3, 4, 2, 2, 3),
        (draw.randint(200, 300), draw.randint(150, 300)) if draw.chance(0.3) else (2, 2),
    ])  # fmt: skip


def check_subnetwork_weight(draw: Random, call: Call) -> None:
    a = call.arguments
    partition, active, update = a["partition"], a["active"], a["update"]
    weight = a["weight"].detach().requires_grad_()
    place = {"device": weight.device, "row": partition.row, "col": partition.col}
    defaults = partition.defaults.values(weight.shape, weight.dtype, **place)
    with draw.machine():
        got = pk.subnetwork_weight(**a | {"weight": weight})
    assert same(got, torch.where(partition.ids() <= active, weight, defaults)) and got.is_contiguous()
    if update is None:
        assert not got.requires_grad
        return
    grad = in_layout(draw.randn(got.shape, got.dtype), draw.choice(LAYOUTS))
    with draw.machine():
        (masked,) = torch.autograd.grad(got, weight, grad)
    assert torch.equal(masked, torch.where(partition.mask(update), grad, 0))


def same(a: Any, b: Any) -> bool:
    """Return whether two tensors are equal, with NaNs equal to NaNs."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def drawn_step(draw: Random, *states: str) -> dict[str, Any]:
    shape, dtype = drawn_shape(draw), draw.choice(draw.dtypes)
    layout, one = draw.choice(WRITABLE), draw.chance(0.5)
    tensors = {
        name: in_layout(
            # The square root of an entry near 0 would magnify rounding.
            draw.randn(shape, dtype).square() + 0.1 if name == "exp_avg_sq" else draw.randn(shape, dtype),
            layout if one else draw.choice(WRITABLE),
        )
        for name in ("parameter", "grad", *states)
    }
    partition = draw.choice((None, drawn_partition(draw, shape, dtype), drawn_partition(draw, shape, dtype)))
    update = None if partition is None else draw.randint(1, partition.num_partitions)
    numbers = {"lr": draw.choice((0.1, 1e-3)), "weight_decay": draw.choice((0.0, 0.2))}
    return tensors | numbers | {"partition": partition, "update": update}


@operator
def sgd_step(draw: Random) -> Call:
    momentum = draw.choice((0.0, 0.9))
    more = {"momentum": momentum, "nesterov": momentum > 0 and draw.chance(0.5)}
    arguments = drawn_step(draw, *(("momentum_buffer",) if momentum else ())) | more
    return Call(pk.sgd_step, {"momentum_buffer": None} | arguments, check_step)


@operator
def adam_step(draw: Random) -> Call:
    more = {
        "step": draw.choice((1, 2, 1000)),
        "decoupled": draw.chance(0.5),
        "betas": draw.choice(((0.9, 0.99), (0.0, 0.5))),
    }
    return Call(pk.adam_step, drawn_step(draw, "exp_avg", "exp_avg_sq") | more, check_step)


STATES = ("parameter", "grad", "momentum_buffer", "exp_avg", "exp_avg_sq")


def check_step(draw: Random, call: Call) -> None:
    """Compare the partition's entries with torch's step; all other entries must be unchanged, including NaNs."""
    tensors = {name: call.arguments[name] for name in STATES if call.arguments.get(name) is not None}
    numbers = {name: value for name, value in call.arguments.items() if name not in STATES}
    partition, update = numbers.pop("partition"), numbers.pop("update")
    whole = torch.ones_like(tensors["parameter"], dtype=torch.bool)
    mask = whole if partition is None else partition.mask(update)
    if draw.chance(0.7):  # otherwise a step of these entries is seen, which would leave NaNs as they are
        for tensor in tensors.values():
            tensor[~mask] = torch.nan
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with draw.machine():
        call.function(**call.arguments)
    step, decoupled = numbers.pop("step", 1), numbers.pop("decoupled", False)
    optimizer = torch.optim.SGD if "momentum" in numbers else torch.optim.AdamW if decoupled else torch.optim.Adam

    @functools.cache
    def dense(dtype: torch.dtype) -> dict[str, Tensor]:
        after = {name: tensor[mask].to(dtype) for name, tensor in before.items()}
        parameter = after["parameter"].requires_grad_()
        parameter.grad = after["grad"]
        torchs = optimizer([parameter], **numbers)
        states = {name: tensor for name, tensor in after.items() if name not in ("parameter", "grad")}
        torchs.state[parameter].update(states, step=torch.tensor(step - 1.0))
        torchs.step()
        return {name: tensor.detach() for name, tensor in after.items()}

    most = 4 * sum(tensor[mask].double().abs() for tensor in before.values())
    for name, tensor in tensors.items():
        assert same(tensor[~mask], before[name][~mask]), f"{name} changed in other partitions"
        if name == "grad":
            assert same(tensor, before[name]), "the gradient has changed"
        else:
            assert_near(tensor[mask], lambda dtype, name=name: dense(dtype)[name], lambda: most)


# Cases that are not calls of one operator.


def partitions(draw: Random) -> None:
    """Check that a map depends only on proportions and seed, survives copies, and agrees with its shards."""
    shape, proportions, seed = drawn_shape(draw), drawn_proportions(draw), draw.getrandbits(63)
    defaults = drawn_defaults(draw, shape, torch.float32)
    with draw.machine():
        partition = pk.Partition.random(shape, proportions, seed=seed, defaults=defaults)
    with pk.use_backend("reference"):
        assert torch.equal(partition.map, pk.Partition.random(shape, proportions, seed=seed).map)
        values = defaults.values(shape)
    total = values.numel()
    assert same(partition.defaults.values(shape), values)
    assert partition.sizes() == sizes(total, proportions) and sum(partition.sizes()) == total
    assert all(abs(size - p * total) < 1 for size, p in zip(partition.sizes(), proportions, strict=True))
    ids = partition.ids()
    assert ids.shape == shape and ids.min() >= 1 and ids.max() <= partition.num_partitions == len(proportions)
    k = draw.randint(1, partition.num_partitions)
    assert torch.equal(partition.mask(k), ids == k)
    for copied in (copy.deepcopy(partition), pickle.loads(pickle.dumps(partition))):
        assert torch.equal(copied.map, partition.map) and copied.num_partitions == partition.num_partitions
    if partition.num_partitions < 256:
        assert torch.equal(pk.Partition.from_ids(ids, num_partitions=partition.num_partitions).map, partition.map)
    start = draw.randrange(shape[0])
    stop = draw.randint(start + 1, shape[0])
    shards = [((slice(start, stop),), partition.rows(start, stop))]
    if len(shape) == 2 and shape[1] > 64:
        stop = draw.randint(65, shape[1])
        shards.append(((slice(None), slice(64, stop)), partition.columns(64, stop)))
    for where, shard in shards:
        assert torch.equal(shard.ids(), ids[where])
        with draw.machine():
            got = pk.subnetwork_weight(torch.ones(shape)[where], shard, 1)
        assert torch.equal(got, torch.where(ids[where] == 1, 1, values[where]))


def entries(draw: Random) -> None:
    """Check that gathered entries are those of a mask in order, and that scattering changes no others."""
    shape, dtype = drawn_shape(draw), draw.choice(draw.dtypes)
    # Triton's kernels take no negated views.
    layouts = [layout for layout in WRITABLE if layout != "negated" or draw.target.backend != "triton"]
    before = draw.randn(shape, dtype)
    tensor, partition = in_layout(before, draw.choice(layouts)), drawn_partition(draw, shape, dtype)
    k = draw.randint(1, partition.num_partitions)
    mask = (partition.ids() == k).to(before.device)
    draw.say(f"{described(tensor)}, {partition}, {k}")
    with draw.machine():
        values = pk.gather_entries(tensor, partition, k)
    assert torch.equal(values, before[mask])
    version = tensor.fill_(torch.nan)._version
    with draw.machine():
        pk.scatter_entries(tensor, partition, k, values)
    assert same(tensor, torch.where(mask, before, torch.nan)) and (tensor._version > version or not len(values))


def case_of(draws: Callable[[Random], Call]) -> Callable[[Random], None]:
    def case(draw: Random) -> None:
        call = draws(draw)
        draw.say(str(call))
        call.check(draw, call)

    return case


CASES = {name: case_of(draws) for name, draws in OPERATORS.items()}
CASES |= {"partitions": partitions, "entries": entries}


RUNS = [
    (name, target)
    for target in [Target("reference", "cpu"), *TARGETS]
    for name in CASES
    if (target.plan != "fused" or name == "linear") and (target.backend != "triton" or name != "partitions")
]


@pytest.mark.parametrize(("name", "target"), RUNS, ids=str)
def test_random_calls_agree_with_dense_pytorch(name, target):
    count = number_of(40 if target.backend in ("cpu", "cuda") else 6)
    run_cases(CASES[name], count, functools.partial(Random, target=target))
