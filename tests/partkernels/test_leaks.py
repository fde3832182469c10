"""Calls leak no memory of the C heap."""

import ctypes
import gc

import pytest
import torch
from against_dense import BACKENDS

import partkernels as pk

CALLS = 400
# glibc's smallest allocation has 32 bytes, so one leak a call exceeds this; caches may fill during the test.
MOST = 16 * CALLS

WEIGHT = torch.randn(16, 8)
KERNEL = torch.randn(6, 4, 3, 3)


def partition(weight):
    return pk.Partition.random(weight.shape, (0.6, 0.4), seed=0, defaults=pk.Uniform(0.1, seed=1))


OWNERS, OF_KERNEL = partition(WEIGHT), partition(KERNEL)
X, IMAGES, IDS = torch.randn(20, 8), torch.randn(2, 4, 6, 6), torch.randint(16, (5,))


def learned(operator, x, weight, *rest):
    x, weight = (each.clone().requires_grad_(each.is_floating_point()) for each in (x, weight))
    operator(x, weight, *rest, update=1).sum().backward()


WORKS = {
    "linear": lambda: pk.linear(X, WEIGHT, OWNERS, 1),
    "linear, learned": lambda: learned(pk.linear, X, WEIGHT, OWNERS, 1),
    "conv2d": lambda: pk.conv2d(IMAGES, KERNEL, OF_KERNEL, 1),
    "conv2d, learned": lambda: learned(pk.conv2d, IMAGES, KERNEL, OF_KERNEL, 1),
    "embedding": lambda: pk.embedding(IDS, WEIGHT, OWNERS, 1),
    "subnetwork_weight": lambda: pk.subnetwork_weight(WEIGHT, OWNERS, 1),
}


FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split()]


def in_use():
    """Return the number of bytes that malloc has allocated."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("this C library does not report allocated memory; glibc 2.33 does")
    library.mallinfo2.restype = Mallinfo2
    gc.collect()
    found = library.mallinfo2()
    return found.uordblks + found.hblkhd


@pytest.mark.full
@pytest.mark.skipif("cpu" not in BACKENDS, reason="only the cpu backend allocates memory")
@pytest.mark.parametrize("work", WORKS)
def test_repeated_calls_do_not_leak_memory(work):
    with pk.use_backend("cpu"):
        for _ in range(CALLS):
            WORKS[work]()
        before = in_use()
        for _ in range(CALLS):
            WORKS[work]()
        assert in_use() - before < MOST
