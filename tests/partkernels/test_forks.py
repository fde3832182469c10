"""Small operators after a fork: the child process has no other threads and must not wait for any."""

import os
import subprocess
import sys

import pytest

import partkernels as pk

# Timeout in seconds for a child that hangs; normally it takes 0.1 s.
LIMIT = 20

PROGRAM = """
import os, sys
import torch
import partkernels as pk

torch.set_num_threads(4)
KINDS = [pk.Zeros(), pk.Uniform(0.1, seed=1), pk.Normal(0.1, seed=1)]

def work(n):
    "Every operator, forward and backward, on weights of n times n entries and as many rows."
    for defaults in [*KINDS, pk.Stored(torch.randn(n, n))]:
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

work(512)  # from here on there are threads
work(8)
pid = os.fork()
if pid == 0:
    work(8)
    os._exit(0)
_, status = os.waitpid(pid, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.skipif(pk.backends()["cpu"] != "ready", reason="the reference's operators wait for threads in a child")
def test_a_child_of_a_fork_does_small_work_alone():
    environment = {**os.environ, "PARTKERNELS_BACKEND": "cpu", "OMP_NUM_THREADS": "4"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], env=environment, timeout=LIMIT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
