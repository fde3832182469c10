"""The Triton backend: results that are independent of tiles, inline assembly, plans and their measurements."""

from __future__ import annotations

import itertools
import re

import numpy as np
import ptx
import pytest
import torch
from against_dense import INTERPRETED, TRITON
from pairwise import pairwise
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import partkernels as pk
from partkernels.backend import dispatch, rebuilt
from partkernels.backend.plan import use_plan
from partkernels.backend.triton import launch, linear, measured, optimizers, plans
from partkernels.backend.triton import operators as triton_operators
from partkernels.backend.triton.defaults import UNIFORM_PAIR
from partkernels.backend.triton.packed_map import SPREAD, threshold
from partkernels.backend.triton.plans import Config, Product
from partkernels.backend.triton.rebuild import SELECT
from partkernels.formats.packed_map import pack
from partkernels.operators.optimizers import Steps

pytestmark = pytest.mark.skipif(not TRITON, reason="neither a GPU nor Triton's interpreter")
DEVICE = TRITON[0].device if TRITON else "cpu"
DRAWN = [pk.Uniform(0.3, seed=2**40 + 7, stream=5), pk.Normal(0.3, seed=9)]


@pytest.fixture(autouse=True)
def _on_triton():
    with pk.use_backend("triton"):
        yield


def layer(
    shape: tuple[int, ...], defaults: pk.Defaults, dtype: torch.dtype, count: int = 3
) -> tuple[pk.Partition, Tensor]:
    partition = pk.Partition.random(shape, [1 / count] * count, seed=1, defaults=defaults).to(DEVICE)
    return partition, torch.randn(shape, device=DEVICE).to(dtype)


def by_reference(weight: Tensor, partition: pk.Partition, active: int) -> Tensor:
    with pk.use_backend("reference"):
        return pk.subnetwork_weight(weight, partition, active)


TILES = [Config(16, 16, 4, 1), Config(64, 32, 4, 3), Config(32, 64, 2, 2), Config(128, 256, 8, 3)]


@pytest.mark.cases(usual=2, full=5)
@pairwise(
    # Interpreted, these take seconds each: test every tile in one dtype, and every dtype with one tile. The largest
    # tile in float32 exceeds an H200's shared memory.
    lambda defaults, dtype, tile: (
        dtype == torch.bfloat16 or tile == TILES[1] if INTERPRETED else dtype != torch.float32 or tile != TILES[-1]
    ),
    defaults=DRAWN,
    dtype=[torch.float16, torch.bfloat16, torch.float32],
    tile=TILES,
)
def test_products_with_unit_vectors_are_the_references_bits_whatever_the_tile(defaults, dtype, tile):
    partition, weight = layer((33, 70), defaults, dtype)
    expected = by_reference(weight, partition, 2)
    with use_plan(tile):
        columns = pk.linear(torch.eye(70, dtype=dtype, device=DEVICE), weight, partition, 2)
        assert torch.equal(columns.t(), expected)


def by_both(x: Tensor, weight: Tensor, partition: pk.Partition, bias: Tensor | None = None) -> list[list[Tensor]]:
    """Return output and gradients by the reference and by Triton; sums of whole numbers are exact."""
    leaves, results = [x.requires_grad_(), weight.mul(2).round().requires_grad_()], []
    for backend in ("reference", "triton"):
        with pk.use_backend(backend), use_plan("fused"):
            y = pk.linear(*leaves, partition, 2, update=1, bias=bias)
            grad = y.detach().round().transpose(0, -1).contiguous().transpose(0, -1)
            results.append([y, *torch.autograd.grad(y, leaves, grad)])
    return results


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("shape", [(3, 40, 130), (40, 130), (2, 3, 5, 130), (1, 40, 1, 130)])
def test_sums_that_several_programs_share(shape, monkeypatch):
    monkeypatch.setattr(launch, "gpu", lambda _: launch.Gpu("large", 1000, 227 << 10, is_hopper=True))
    monkeypatch.setattr(plans, "_LEAST_STEPS", 1)
    partition, weight = layer((130, shape[-1]), pk.Zeros(), torch.float32)
    x = torch.randn(shape, device=DEVICE).mul(2).round()
    assert all(map(torch.equal, *by_both(x, weight, partition, torch.arange(130.0, device=DEVICE))))


def test_rows_of_any_strides():
    # Four dimensions that cannot be merged are copied; three give rows at two strides.
    partition, weight = layer((40, 70), pk.Zeros(), torch.float32)
    memory = torch.randn(2, 3, 5, 70, device=DEVICE).mul(2).round()
    sparse = memory[..., ::2].repeat(1, 1, 1, 2)
    for x in (memory.permute(2, 1, 0, 3), memory[0].permute(1, 0, 2), sparse.permute(2, 1, 0, 3)):
        assert all(map(torch.equal, *by_both(x, weight, partition)))


def test_offsets_beyond_32_bits():
    # Only a few pages of this memory are ever touched.
    memory = torch.empty((1 << 31) + 4096, dtype=torch.bfloat16, device=DEVICE)
    partition, weight = layer((2, 70), pk.Zeros(), torch.bfloat16)
    entries, values = weight[partition.mask(2)], torch.randn(2, 70, device=DEVICE).bfloat16()
    for strides in ((1 << 31, 1), (1, 1 << 24)):
        far = memory.as_strided((2, 70), strides)
        far.copy_(values)
        with use_plan("fused"):
            assert torch.equal(pk.linear(far, weight, partition, 2), pk.linear(values, weight, partition, 2))
        far.fill_(0)
        pk.scatter_entries(far, partition, 2, entries)
        assert torch.equal(far, weight * partition.mask(2))
        assert torch.equal(pk.gather_entries(far, partition, 2), entries)


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """Return the list in which launched optimizer kernels and copies to the GPU are recorded."""
    found = []

    class Noting:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(optimizers, name)

        def __getitem__(self, grid):
            found.append(self.name)
            return self.kernel[grid]

    for name in ("sgd_kernel", "adam_kernel", "counting_kernel"):
        monkeypatch.setattr(optimizers, name, Noting(name))
    copy = launch.to_gpu
    monkeypatch.setattr(launch, "to_gpu", lambda *of: found.append("copy") or copy(*of))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_all_tensors_of_a_dtype_take_one_launch(dtype, launched):
    shapes = [(), (0, 3), (66, 520), *((2 + i, 1 + 2 * i) for i in range(20))]
    columns = [[torch.rand(shape, device=DEVICE).to(dtype) for shape in shapes] for _ in range(4)]
    random = [pk.Partition.random(shape, (0.5, 0.5), seed=0).to(DEVICE) for shape in shapes[2:-1]]
    partitions = [None, None, *random, None]
    pk.sgd_steps(*columns[:3], partitions, 2, lr=0.1, momentum=0.9)
    pk.adam_steps(*columns, partitions, 2, steps=[1] * len(shapes), lr=0.1)
    kernels = [name for name in launched if name != "copy"]
    assert kernels == ["sgd_kernel", "counting_kernel", "adam_kernel"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_counted_on_the_gpu_and_nothing_is_copied_there_again(dtype, launched):
    partition = pk.Partition.random((9, 40), (0.5, 0.3, 0.2), seed=1).to(DEVICE)
    each = [[torch.rand(shape, device=DEVICE).to(dtype) for _ in range(4)] for shape in ((9, 40), (5,))]
    partitions = [partition, None]
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "decoupled": False}
    counters = [torch.tensor([3, 2000, 0], device=DEVICE), torch.tensor([1, 0, 5], device=DEVICE)]
    expected = [[tensor.clone() for tensor in tensors] for tensors in each]

    def step() -> None:
        parameters, grads, *moments = map(list, zip(*each, strict=True))
        Steps(parameters, moments, partitions, 2, counters)(grads, **numbers)

    for taken in (1, 2):
        step()
        with pk.use_backend("reference"):
            for tensors, own, before in zip(expected, partitions, (2000, 0), strict=True):
                pk.adam_step(*tensors, own, 2, step=before + taken, lr=0.1)
    for tensors, others in zip(each, expected, strict=True):
        for one, other in zip(tensors, others, strict=True):
            torch.testing.assert_close(one, other, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)
    assert [counter.tolist() for counter in counters] == [[3, 2002, 0], [1, 2, 5]]
    launched.clear()
    step()
    assert launched == ["counting_kernel", "adam_kernel"]
    each[0][1] = each[0][1].clone()
    launched.clear()
    step()
    assert launched.count("copy") == 1  # of the table, as a gradient is elsewhere


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_threshold_of_packed_fields(bits):
    ids = torch.arange(256).remainder(1 << bits).to(torch.uint8).view(1, -1)
    words = pack(ids, bits).numpy().view(np.uint32)[0]
    for active in range(1, 1 << bits):
        low, addend, below = (np.uint32(word) for word in threshold(bits, active))
        carried = (words & low) + addend
        dead = (words & carried) | (below & (words | carried))
        tops = [dead[i * bits // 32] >> (i * bits % 32 + bits - 1) & 1 for i in range(256)]
        assert tops == [int(i) >= active for i in ids[0]], active


def test_the_assembly_of_uniform_draws_is_the_format():
    bytes_ = np.arange(1 << 16, dtype=np.uint32)
    for scale in (1e-3, 0.37, 5.0, 1e20):
        u = np.float32(pk.Uniform(scale, seed=0).step).view(np.uint32) >> 16
        for half in (0, 1):
            word = bytes_ << (16 * half) | 0xA5C30000 >> (16 * half)
            constants = (0x4140 + 0x0202 * half, u | u << 16, 0x3F803F80, 0xC2FFC2FF, 0x80008000)
            pairs = ptx.run(UNIFORM_PAIR.value, word, *constants)
            for shift in (0, 8):
                byte = torch.from_numpy((bytes_ >> shift).astype(np.int64))
                magnitude = ((byte & 0x7F) + 0.5) * float(pk.Uniform(scale, seed=0).step)
                expected = torch.where(byte & 0x80 > 0, -magnitude, magnitude).bfloat16()
                ours = (
                    torch.from_numpy((pairs >> (2 * shift) & 0xFFFF).astype(np.int32))
                    .to(torch.int16)
                    .view(torch.bfloat16)
                )
                assert torch.equal(ours, expected)


def test_the_assembly_of_masks_and_selections():
    words = np.random.default_rng(0).integers(0, 1 << 32, size=(3, 1000), dtype=np.uint32)
    for byte in range(4):
        mask = ptx.run(SPREAD.value, *words[:2], 0xCC88 + 0x1111 * byte)
        bits = words[:2] >> (8 * byte + 7) & 1
        assert (mask == bits[0] * np.uint32(0xFFFF) | bits[1] * np.uint32(0xFFFF0000)).all()
    mask, default, weight = words
    assert (ptx.run(SELECT.value, mask, default, weight) == (mask & default | ~mask & weight)).all()


HOPPER = launch.Gpu("a GPU of 9.0", 132, 227 << 10, is_hopper=True)


def product(**changes) -> Product:
    return Product(
        **{
            "down": 4096, "across": 4096, "depth": 4096, "dtype": torch.bfloat16, "bits": 2, "kind": "uniform",
            "tf32": False, "gpu": HOPPER, **changes,
        }
    )  # fmt: skip


@pytest.fixture
def own_measurements(tmp_path, monkeypatch):
    monkeypatch.setenv("PARTKERNELS_CACHE", str(tmp_path))
    measured.read_again()
    yield tmp_path
    measured.read_again()


@pytest.mark.parametrize(
    ("changes", "is_fused", "reason"),
    [
        ({"dtype": torch.float64}, False, "no float64"),
        ({"dtype": torch.float32}, False, "float32 without TF32"),
        ({"across": 8}, True, "8 rows of x: reading the weight takes longest"),
        ({"dtype": torch.float32, "across": 8}, True, "8 rows of x"),
        ({"across": 512}, True, "estimated, not measured"),
        ({"across": 65536}, False, "estimated, not measured"),
        ({"kind": "normal", "across": 2048}, False, "estimated, not measured"),
        ({"dtype": torch.float32, "tf32": True, "across": 512}, False, "estimated, not measured"),
    ],
)
def test_a_plan_and_its_reason(changes, is_fused, reason, own_measurements):
    plan = plans.choose(product(**changes))
    assert (plan.config is not None) == is_fused and reason in plan.reason


def test_estimates_change_once_from_fused_to_rebuilding(own_measurements):
    for kind in ("zeros", "stored", "uniform", "normal"):
        fused = [plans.choose(product(kind=kind, across=n)).config is not None for n in (2**i for i in range(4, 20))]
        assert fused[0] and not fused[-1] and all(a >= b for a, b in itertools.pairwise(fused))


@pytest.mark.parametrize("unknown", ["fast", 3, None, (64, 64, 4, 3)])
def test_an_unknown_plan_is_refused(unknown):
    message = re.escape(f"there is no plan {unknown!r}; pass 'fused', 'rebuild' or a Config")
    with pytest.raises(ValueError, match=message), use_plan(unknown):
        pass


def test_measurements_are_saved_and_used_for_sizes_within_a_factor_of_two(own_measurements):
    measured.remember(product(), (128, 256, 8, 3), {"fused": 200.0, "rebuild": 220.0})
    measured.remember(product(across=1024), None, {"fused": 70.0, "rebuild": 60.0})
    near = plans.choose(product(across=5000))
    assert near.config == Config(128, 256, 8, 3)
    assert "measured on this a GPU of 9.0 at 4096x4096x4096: fused 200 us, rebuild 220 us" in str(near)
    assert plans.choose(product(across=1100)).config is None
    assert "estimated" in plans.choose(product(down=512, across=512)).reason
    assert "estimated" in plans.choose(product(bits=4)).reason
    measured.remember(product(), None, {"fused": 200.0, "rebuild": 190.0})
    assert plans.choose(product()).config is None, "a newer measurement should replace an older one"
    assert len(list(own_measurements.iterdir())) == 1, "no temporary file should be left"


@pytest.mark.parametrize("text", ['[{"product":', "3", '[{"product": {}}]', "[[]]"])
def test_a_damaged_measurement_file_is_ignored_and_replaced(text, own_measurements):
    (own_measurements / "nvidia-h200.json").write_text(text)
    measured.read_again()
    assert "estimated" in plans.choose(product()).reason
    measured.remember(product(), None, {"fused": 2.0, "rebuild": 1.0})
    assert plans.choose(product()).config is None


def test_tuning_measures_each_product_once_and_nothing_is_measured_outside(own_measurements, monkeypatch):
    partition, weight = layer((64, 64), pk.Zeros(), torch.bfloat16)
    x = torch.randn(16, 64, device=DEVICE).bfloat16()
    times = iter(range(100, 0, -1))
    monkeypatch.setattr(plans, "clock", lambda function: function() is not None and float(next(times)))
    first = pk.linear(x, weight, partition, 1)
    assert next(times) == 100, "nothing should be measured outside tuning()"
    with plans.tuning():
        tuned = pk.linear(x, weight, partition, 1)
        after = next(times)
        assert after < 99
        pk.linear(x, weight, partition, 1)
        assert next(times) == after - 1, "a second call with the same sizes should measure nothing"
    assert torch.equal(first, tuned)
    # Each clock reading was lower than the previous one, and the rebuild plan was measured last.
    assert "rebuild, then the vendor's kernel (measured on this" in pk.explain(pk.linear, x, weight, partition, 1)


@pytest.mark.parametrize("changes", [{}, {"across": 16}, {"dtype": torch.float32}])
def test_few_tiles_are_worth_a_measurement_and_all_fit(changes):
    wanted = product(**changes)
    configs = plans.candidates(wanted)
    assert 1 <= len(configs) <= 8 and configs[0] == plans.default_config(wanted) and len(set(configs)) == len(configs)
    for config in configs:
        bytes_ = config.stages * 64 * (config.down + config.across) * wanted.dtype.itemsize
        assert bytes_ <= HOPPER.shared_memory


def test_explain_names_backend_plan_and_reason():
    partition, weight = layer((6, 70), pk.Uniform(0.1, 0), torch.float32)
    x = torch.randn(3, 70, device=DEVICE, requires_grad=True)
    weight.requires_grad_()
    lines = pk.explain(pk.linear, x, weight, partition, 2, update=1).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["linear", "linear_grad_input", "linear_grad_weight"]
    assert all("triton (asked for); " in line for line in lines)
    assert "3 rows of x" in lines[0]
    assert x.grad is None and weight.grad is None
    with use_plan("rebuild"):
        assert "rebuild, then the vendor's kernel (asked for)" in pk.explain(pk.linear, x, weight, partition, 1)


def test_with_all_partitions_active_the_dense_operator_runs_without_the_map(monkeypatch):
    partition, weight = layer((6, 4, 3, 3), pk.Uniform(0.1, 0), torch.float32)
    monkeypatch.setattr(plans, "run", lambda *_: pytest.fail("a plan was made"))
    x = torch.randn(2, 4, 5, 5, device=DEVICE, requires_grad=True)
    y = pk.conv2d(x, weight, partition, 3)
    assert torch.equal(y, torch.nn.functional.conv2d(x, weight))
    assert torch.equal(pk.subnetwork_weight(weight, partition, 3), weight)


@pytest.mark.full
def test_large_weights_are_rebuilt_slice_by_slice(monkeypatch):
    partition, weight = layer((130, 200), pk.Uniform(0.1, 0), torch.float32)
    expected = by_reference(weight, partition, 2)
    monkeypatch.setattr(rebuilt, "SLICE", 64 * 130 * 4)  # fits 41 rows or 64 columns
    slices, rebuild_into = [], linear.rebuild_into
    monkeypatch.setattr(linear, "rebuild_into", lambda out, *rest: slices.append(out) or rebuild_into(out, *rest))
    x = torch.eye(200, device=DEVICE, requires_grad=True)
    with use_plan("rebuild"):
        y = pk.linear(x, weight, partition, 2, bias=torch.zeros(130, device=DEVICE))
        rows = torch.autograd.grad(y, x, torch.eye(200, 130, device=DEVICE))[0]
    assert torch.equal(y.t(), expected) and torch.equal(rows[:130], expected)
    assert [len(out) for out in slices[:4]] == [41, 41, 41, 7]
    assert [out.shape[1] for out in slices[4:]] == [64, 64, 64, 8]
    assert len({out.data_ptr() for out in slices[:4]}) == 1, "slices should reuse the same memory"


@pytest.mark.parametrize("shape", [(7,), (5, 130), (3, 5, 2, 2)])
@pytest.mark.parametrize("defaults", DRAWN, ids=["uniform", "normal"])
def test_defaults_that_kernels_draw_are_the_references(defaults, shape, monkeypatch):
    monkeypatch.setattr(dispatch, "host", lambda: triton_operators)
    ours = defaults.values(shape, torch.float32, DEVICE)
    with pk.use_backend("reference"):
        monkeypatch.undo()
        assert torch.equal(ours, defaults.values(shape, torch.float32, DEVICE))


def a_step(shape: tuple[int, ...] = (40, 70)):
    """Return a layer's loss as a function of x and weight, and both tensors."""
    partition, weight = layer(shape, pk.Uniform(0.1, 0), torch.float32)
    x = torch.randn(8, *shape[1:2], *[6] * (len(shape) - 2), device=DEVICE)
    function = pk.linear if len(shape) == 2 else pk.conv2d

    def step(x: Tensor, weight: Tensor) -> Tensor:
        return (function(x, weight, partition, 2, update=2).sin() ** 2).sum()

    return step, x.requires_grad_(), weight.requires_grad_()


SHAPES = [(40, 70), (16, 64, 3, 3)]


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES)
def test_activation_checkpointing_gives_the_same_bits(shape):
    step, x, weight = a_step(shape)
    eager = torch.autograd.grad(step(x, weight), (x, weight))
    again = torch.autograd.grad(checkpoint(step, x, weight, use_reentrant=False), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(eager, again, strict=True))


gpu_only = pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs and streams need a GPU")


@gpu_only
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("plan", ["fused", "rebuild"])
def test_a_cuda_graph_replays_with_new_values(shape, plan):
    step, x, weight = a_step(shape)
    with use_plan(plan):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step(x, weight).backward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        x.grad = weight.grad = None
        with torch.cuda.graph(graph), plans.tuning():
            step(x, weight).backward()
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        eager = torch.autograd.grad(step(x, weight), (x, weight))
    assert torch.equal(x.grad, eager[0]) and torch.equal(weight.grad, eager[1])


@gpu_only
def test_two_streams_do_not_share_a_workspace():
    step, x, weight = a_step((512, 512))
    inputs = [torch.randn_like(x) for _ in range(16)]
    with use_plan("rebuild"), torch.no_grad():
        alone = [step(value, weight) for value in inputs]
        streams = [torch.cuda.Stream() for _ in inputs]
        torch.cuda.synchronize()
        together = []
        for stream, value in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                together.append(step(value, weight))
        torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("plan", ["fused", "rebuild"])
def test_kernels_run_on_the_tensors_gpu_whichever_is_current(plan):
    step, x, weight = a_step()
    with use_plan(plan):
        here = step(x, weight)
        partition, _ = layer((40, 70), pk.Uniform(0.1, 0), torch.float32)
        there = pk.linear(x.to("cuda:1"), weight.to("cuda:1"), partition.to("cuda:1"), 2)
    assert there.device.index == 1 and torch.equal((there.sin() ** 2).sum().cpu(), here.cpu())


def test_an_h200_uses_the_measurements_of_an_h200(own_measurements):
    plan = plans.choose(product(gpu=launch.Gpu("NVIDIA H200", 132, 227 << 10, is_hopper=True)))
    assert plan.config is None and "measured on a NVIDIA H200 at 4096x4096x4096: " in plan.reason
