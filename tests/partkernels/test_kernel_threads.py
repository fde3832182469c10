"""Threads: results are independent of their number, calls may overlap, and a fork's child does not wait for any."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from against_dense import BACKENDS, CONV2D, LINEAR, Case, partition_of

import partkernels as pk
from partkernels.backend import dispatch
from partkernels.backend.reference import operators as reference

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="only the cpu backend has threads of its own")


def layer(case: Case):
    partition = partition_of(case)
    x, weight = torch.randn(case.x, requires_grad=True), torch.randn(case.weight, requires_grad=True)

    def work():
        y = case.ours(x, weight, partition, active=2, update=1)
        return [y, *torch.autograd.grad((y * y).sum(), (x, weight))]

    return work


def step(shape: tuple[int, ...]):
    partition = pk.Partition.random(shape, (0.8, 0.1, 0.1), seed=1)
    start = [torch.rand(shape) + 0.1 for _ in range(4)]

    def work():
        tensors = [tensor.clone() for tensor in start]
        pk.adam_step(*tensors, partition, 1, step=7, lr=0.01)
        return tensors

    return work


def random_map():
    counts = 1500, 1111, [1_333_201, 166_649, 166_650], 9
    expected = reference.random_map(*counts)

    def work():
        found = dispatch.choose("cpu", torch.device("cpu")).random_map(*counts)
        assert torch.equal(found, expected)
        return [found]

    return work


WORKS = {
    "linear": lambda: layer(LINEAR["blocks"]),
    "conv2d": lambda: layer(CONV2D["deep"]),
    "steps of rows": lambda: step((300, 530)),
    "steps of long rows": lambda: step((2, 70_001)),
    "steps of kernels": lambda: step((64, 64, 3, 3)),
    "map": random_map,
}


@pytest.mark.parametrize("work", WORKS)
def test_results_do_not_depend_on_the_number_of_threads(work):
    threads, results, work = torch.get_num_threads(), [], WORKS[work]()
    try:
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            with pk.use_backend("cpu"):
                results.append(work())
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_two_threads_may_call_at_once():
    case = LINEAR["blocks"]
    partition, inputs, weight = partition_of(case), torch.randn(16, *case.x), torch.randn(case.weight)

    def layer(x):
        with torch.no_grad(), pk.use_backend("cpu"):
            return case.ours(x, weight, partition, active=2)

    with ThreadPoolExecutor(2) as threads:
        assert all(map(torch.equal, map(layer, inputs), threads.map(layer, inputs)))


FORK = """
import os, sys
import torch
import partkernels as pk

torch.set_num_threads(4)

def work(n):
    for defaults in [pk.Zeros(), pk.Uniform(0.1, seed=1), pk.Normal(0.1, seed=1), pk.Stored(torch.randn(n, n))]:
        p = pk.Partition.random((n, n), (0.5, 0.5), seed=0, defaults=defaults)
        w, x = torch.randn(n, n, requires_grad=True), torch.randn(n, n, requires_grad=True)
        bias = torch.randn(2, n, requires_grad=True)
        pk.linear(x, w, p, 1, update=1, bias=bias).sum().backward()
        pk.subnetwork_weight(w, p, 1, update=1).sum().backward()
        pk.embedding(torch.arange(n), w, p, 1, update=1).sum().backward()
        with torch.no_grad():
            pk.sgd_step(w, w.grad, None, p, 1, lr=0.1)
            m, v = torch.zeros(n, n), torch.zeros(n, n)
            pk.adam_step(w, w.grad, m, v, p, 1, step=1, lr=0.1)
    w = torch.randn(4, n, 3, 3)  # convolutions themselves are PyTorch's, and wait for threads in a child
    pk.subnetwork_weight(w, pk.Partition.random(w.shape, (0.5, 0.5), seed=0), 1)

work(512)  # starts threads
pid = os.fork()
if pid == 0:
    work(8)
    os._exit(0)
_, status = os.waitpid(pid, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_finishes_small_operations():
    environment = {**os.environ, "PARTKERNELS_BACKEND": "cpu", "OMP_NUM_THREADS": "4"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-W", "ignore", "-c", FORK]
    run = subprocess.run(command, env=environment, timeout=60, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
