"""The thread pool, Python threads and forked processes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import partkernels_numpy as pkn

N = 300


@pytest.fixture(autouse=True)
def threads():
    before = pkn.threads()
    yield
    pkn.set_threads(before)


def layer(dtype=np.float32):
    rng = np.random.default_rng(0)
    partition = pkn.Partition.random((N, N), (0.6, 0.4), seed=0, defaults=pkn.Uniform(0.1, 1))
    return rng.standard_normal((N, N)).astype(dtype), rng.standard_normal((N, N)).astype(dtype), partition


def test_results_do_not_depend_on_the_number_of_threads():
    x, weight, partition = layer()
    found = []
    for count in (1, 2, 3, 8):
        pkn.set_threads(count)
        assert pkn.threads() == count
        found.append(
            [
                pkn.linear(x, weight, partition, 1),
                pkn.linear_grad_input(x, weight, partition, 1),
                pkn.linear_grad_weight(x, x, partition, 2),
                pkn.Partition.random((N, N), (0.6, 0.4), seed=5).map,
            ]
        )
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(one, same)


def test_many_threads_of_python_call_at_once():
    x, weight, partition = layer()
    pkn.set_threads(4)
    expected = pkn.linear(x, weight, partition, 1)
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: pkn.linear(x, weight, partition, 1), range(64)):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.full
def test_python_goes_on_during_a_call():
    x, weight, partition = layer(np.float64)
    x, seen, stop = np.concatenate([x] * 100), [], threading.Event()

    def watch():
        while not stop.is_set():
            seen.append(time.perf_counter())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.perf_counter()
    pkn.linear(x, weight, partition, 1)
    end = time.perf_counter()
    stop.set()
    watcher.join()
    assert sum(begin < moment < end for moment in seen) >= 3


def _in_a_child(queue):
    x, weight, partition = layer()
    queue.put((pkn.threads(), pkn.linear(x, weight, partition, 1)))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_forked_process_has_threads_of_its_own():
    x, weight, partition = layer()
    pkn.set_threads(3)
    expected = pkn.linear(x, weight, partition, 1)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=_in_a_child, args=(queue,)) for _ in range(2)]
    for child in children:
        child.start()
    for _ in children:
        threads, found = queue.get(timeout=60)
        assert threads == 3
        np.testing.assert_array_equal(found, expected)
    for child in children:
        child.join(60)
        assert child.exitcode == 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("asked", "threads"), [("3", 3), (" 3,2", 3), *((no, len(os.sched_getaffinity(0))) for no in ("", "many", "0"))]
)
def test_as_many_threads_as_the_environment_asks_for(asked, threads):
    code = "import partkernels_numpy as pkn; print(pkn.threads())"
    environment = {**os.environ, "OMP_NUM_THREADS": asked}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) == threads


AT_EXIT = """
import threading, time
import numpy as np
import partkernels_numpy as pkn

partition = pkn.Partition.random((512, 512), (0.5, 0.5), seed=0)
weight, x = np.ones((512, 512), np.float32), np.ones((256, 512), np.float32)

def forever():
    while True:
        pkn.linear(x, weight, partition, 1)

for _ in range(3):
    threading.Thread(target=forever, daemon=True).start()
time.sleep(0.2)
"""


@pytest.mark.full
def test_a_program_ends_while_others_of_its_threads_compute():
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("threads", [0, -1, 1.5, True, None, 10**12])
def test_an_invalid_number_of_threads_raises(threads):
    with pytest.raises(ValueError, match=r"pass an int in 1\.\.1024"):
        pkn.set_threads(threads)
