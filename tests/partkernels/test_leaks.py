"""Calls leak no memory of the C heap."""

import ctypes
import gc

import pytest
from against_dense import BACKENDS, Target
from test_fuzz import OPERATORS, Call, Random
from torch import Tensor

import partkernels as pk

CALLS = 400
# glibc's smallest allocation has 32 bytes, so one leak a call exceeds this; caches may fill during the test.
MOST = 16 * CALLS

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


def work(call: Call):
    result = call.function(**call.arguments)
    if result is not None and result.requires_grad:
        result.sum().backward()


@pytest.mark.full
@pytest.mark.skipif("cpu" not in BACKENDS, reason="only the cpu backend allocates memory")
@pytest.mark.parametrize("name", OPERATORS)
def test_repeated_calls_do_not_leak_memory(name):
    calls = [OPERATORS[name](Random(seed, Target("cpu", "cpu"))) for seed in range(4)]
    for argument in [call.arguments.get(name) for call in calls for name in ("x", "weight")]:
        if isinstance(argument, Tensor):
            argument.requires_grad_()
    with pk.use_backend("cpu"):
        for _ in range(CALLS):
            for call in calls:
                work(call)
        before = in_use()
        for _ in range(CALLS):
            for call in calls:
                work(call)
        assert in_use() - before < MOST
