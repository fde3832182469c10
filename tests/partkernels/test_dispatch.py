"""The choice of the backend, and the message if a backend cannot run."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from processes import run_python
from torch.utils.checkpoint import checkpoint

import partkernels as pk
from partkernels import build_info
from partkernels.backend import cuda, dispatch
from partkernels.backend.cpu import operators as cpu
from partkernels.backend.reference import operators as reference


def run(*arguments: str, **environment: str):
    return run_python(*arguments, environment=os.environ | environment)


@pytest.fixture
def without_library(monkeypatch, tmp_path):
    """Make partkernels behave as if no library had been built."""
    monkeypatch.setattr(build_info, "FOLDER", tmp_path)
    statuses = [dispatch.BACKENDS[name].status for name in ("cpu", "cuda")]
    cached = [*statuses, dispatch._warn_of_reference, build_info._found, dispatch.choose]
    for function in cached:
        function.cache_clear()
    yield tmp_path
    for function in cached:
        function.cache_clear()


def example() -> tuple:
    return torch.randn(2, 3), torch.randn(4, 3), pk.Partition.random((4, 3), (0.5, 0.5), seed=0)


def test_the_cpp_backend_was_built():
    assert pk.backends()["cpu"] == "ready"
    assert build_info.facts()["cpu"] == "built"


@pytest.mark.parametrize("facts", [None, '{"torch": "2.13.0"}'])
def test_libraries_of_an_interrupted_build_are_not_loaded(facts, without_library):
    for backend in ("cpu", "cuda"):
        (without_library / f"_{backend}.so").write_text("half a library")
    if facts is not None:
        (without_library / "build_info.json").write_text(facts)
    found = pk.backends()
    assert found["reference"] == "ready"
    assert found["cpu"].startswith("not built") and found["cuda"].startswith("not built")


def test_auto_takes_cpp_on_a_cpu_and_the_reference_for_a_dtype_that_it_lacks():
    assert dispatch.choose("auto", torch.device("cpu"), torch.float32) is cpu
    dispatch._warn_of_reference.cache_clear()
    dispatch.choose.cache_clear()
    with pytest.warns(UserWarning, match=r"cpu: it serves .* and the tensors are torch.float16"):
        assert dispatch.choose("auto", torch.device("cpu"), torch.float16) is reference


def test_use_backend_nests_and_restores():
    assert dispatch.requested() == "auto"
    with pk.use_backend("cpu"):
        with pytest.raises(KeyError), pk.use_backend("reference"):
            assert dispatch.requested() == "reference"
            raise KeyError
        assert dispatch.requested() == "cpu"
    assert dispatch.requested() == "auto"


def test_each_thread_asks_for_its_own_backend():
    wrong, start = [], threading.Barrier(8)

    def ask(number):
        start.wait()
        for turn in range(50):
            name = ("reference", "cpu")[(number + turn) % 2]
            with pk.use_backend(name):
                wrong.append(dispatch.requested() != name)
            wrong.append(dispatch.requested() != "auto")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(8)))
    assert len(wrong) == 800 and not any(wrong)


@pytest.mark.full
def test_a_backward_pass_in_a_thread_of_autograd_recomputes_on_the_backend_of_the_forward():
    """Nest more than 60 backward passes, so that they run in separate threads as on a GPU."""
    asked = []

    def nested(depth):
        def compute(x):
            asked.append((threading.get_ident(), dispatch.requested()))
            return x * 2 if depth == 0 else checkpoint(nested(depth - 1), x, use_reentrant=True)

        return compute

    with pk.use_backend("reference"):
        nested(70)(torch.ones(2, requires_grad=True)).sum().backward()
    assert len({thread for thread, _ in asked}) > 1
    assert {name for _, name in asked} == {"reference"}


def test_the_gradient_runs_on_the_backend_of_the_forward(monkeypatch):
    x, weight, partition = example()
    with pk.use_backend("cpu"):
        y = pk.linear(x.requires_grad_(), weight, partition, 1)
    monkeypatch.setattr(reference, "linear_grad_input", lambda *_: pytest.fail("the backend changed"))
    with pk.use_backend("reference"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("cuda", RuntimeError, r"'cuda' cannot run this: .*Ready here: reference, "),
        ("gpu", ValueError, "'gpu'; known are auto, cpu, cuda, reference, triton"),
        ("cpu", RuntimeError, r"serves .* and the tensors are torch.float16"),  # no other backend takes its place
    ],
    ids=["without a GPU", "unknown", "without the dtype"],
)
def test_a_backend_that_cannot_run_raises(name, error, message):
    x, weight, partition = example()
    with pytest.raises(error, match=message), pk.use_backend(name):
        pk.linear(x.half(), weight.half(), partition, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: Triton runs")
def test_without_a_gpu_triton_says_so_and_names_its_interpreter():
    code = "import partkernels as pk; print(pk.backends()['triton']); pk.use_backend('triton').__enter__()"
    done = run("-c", code, TRITON_INTERPRET="0")
    assert "no GPU" in done.stdout and "TRITON_INTERPRET=1" in done.stdout
    assert "RuntimeError: The backend 'triton' cannot run this: no GPU" in done.stderr


def test_interpreted_kernels_run_only_where_they_are_asked_for():
    code = (
        "import torch, sys; from partkernels.backend import dispatch as d; d.choose('auto', torch.device('cpu'));"
        "print(d.backends()['triton'], 'partkernels.backend.triton.operators' in sys.modules)"
    )
    assert run("-c", code, TRITON_INTERPRET="1").stdout.strip() == "ready False"


def test_an_exception_inside_a_kernel_is_an_exception(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(cpu, "linear", broken)
    x, weight, partition = example()
    with pytest.raises(ZeroDivisionError):
        pk.linear(x, weight, partition, 1)


def test_without_a_library_auto_says_once_that_it_runs_the_reference(without_library):
    x, weight, partition = example()
    with pytest.warns(UserWarning, match="cpu: not built"):
        pk.linear(x, weight, partition, 1)
    pk.linear(x, weight, partition, 1)  # a second warning would raise
    with pytest.raises(RuntimeError, match="PARTKERNELS_BUILD=cpu"), pk.use_backend("cpu"):
        pass


def test_a_library_that_does_not_load_is_explained(without_library):
    (without_library / "_cpu.so").write_text("not a library")
    (without_library / "build_info.json").write_text('{"cpu": "built"}')
    assert "does not load" in pk.backends()["cpu"]
    assert "reinstall partkernels" in pk.backends()["cpu"]


def test_the_environment_chooses_a_backend():
    code = "from partkernels.backend import dispatch as d; print(d.requested())"
    assert run("-c", code, PARTKERNELS_BACKEND="reference").stdout.strip() == "reference"
    wrong = run("-c", code, PARTKERNELS_BACKEND="mps")
    assert wrong.returncode != 0 and "PARTKERNELS_BACKEND names the backend 'mps'" in wrong.stderr


def test_the_module_prints_versions_build_facts_and_backends():
    printed = run("-m", "partkernels").stdout
    for expected in (pk.__version__, torch.__version__, "compiler", "reference", "cpu        ready"):
        assert expected in printed


@pytest.mark.parametrize(
    ("built", "capability", "status"),
    [
        ("sm_80, PTX 80, sm_90a", (9, 0), dispatch.READY),
        ("sm_80, PTX 80, sm_90a", (8, 6), dispatch.READY),
        ("sm_80, PTX 80, sm_90a", (12, 0), dispatch.READY),
        ("sm_80, sm_90a", (12, 0), "TORCH_CUDA_ARCH_LIST=12.0, otherwise use triton or reference"),
        ("sm_86", (8, 0), "has compute capability 8.0"),
        ("sm_80, PTX 80", (7, 5), "has compute capability 7.5; if that is 8.0"),
    ],
)
def test_the_cuda_library_runs_only_on_gpus_that_it_was_built_for(built, capability, status, monkeypatch):
    monkeypatch.setattr(cuda, "load_library", lambda backend: dispatch.READY)
    monkeypatch.setattr(build_info, "facts", lambda: {"cuda": f"built for {built}"})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    found = dispatch.BACKENDS["cuda"].status.__wrapped__()
    assert found == status if status == dispatch.READY else status in found
