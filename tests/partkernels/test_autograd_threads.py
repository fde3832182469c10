"""Objects passed to threads of backward passes stay alive, even if PyTorch releases them once too often."""

import ctypes
import sys

import pytest
import torch

import partkernels as pk
import partnets
from partkernels import autograd_threads
from partkernels.autograd_threads import hand_on, handed_on
from partnets.utils.in_thread import HANDED_ON, InThread, holding

ROUNDS = 100
COUNTED = torch._C._stash_obj_in_tls


def borrow(name: str, value: object) -> None:
    """Emulate PyTorch 2.11, which releases a reference that it does not own."""
    COUNTED(name, value)
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(value))


@pytest.fixture(params=["this PyTorch", "one that borrows"])
def _pytorch(request, monkeypatch):
    before = {name: handed_on(name, {}) for name in ("a test", HANDED_ON)}
    if request.param == "one that borrows" and not autograd_threads._BORROWS:
        monkeypatch.setattr(torch._C, "_stash_obj_in_tls", borrow)
        monkeypatch.setattr(autograd_threads, "_BORROWS", autograd_threads._borrows())
        assert autograd_threads._BORROWS
    yield
    for name, value in before.items():
        hand_on(name, value)


@pytest.mark.usefixtures("_pytorch")
def test_what_is_handed_on_is_held_once():
    value = object()
    before = sys.getrefcount(value)
    for _ in range(ROUNDS):
        hand_on("a test", value)
        assert handed_on("a test") is value
    assert sys.getrefcount(value) == before + 1
    hand_on("a test", None)
    assert sys.getrefcount(value) == before


@pytest.mark.usefixtures("_pytorch")
def test_contexts_free_nothing_that_others_hold():
    # A string object that nothing else references and that Python does not intern; caches hold a different one.
    layer = partnets.Linear(4, 3, proportions=(0.5, 0.5), seed=0)
    with pk.use_backend("".join(["refer", "ence"])), partnets.subnetwork(layer, active=1, update=1):
        layer(torch.ones(2, 4)).sum().backward()
    name, value = "".join(["refer", "ence"]), InThread()
    held = [name, value, layer]
    before = [sys.getrefcount(one) for one in held]
    for _ in range(ROUNDS):
        with pk.use_backend(name), partnets.subnetwork(layer, active=1, update=1), holding({value: name}):
            layer(torch.ones(2, 4)).sum().backward()
            kept = handed_on(HANDED_ON)
        assert kept[value] is name
    del kept
    assert [sys.getrefcount(one) for one in held] == before


def test_what_nobody_left_is_what_the_caller_says():
    assert handed_on("what nobody left") is None
    assert handed_on("what nobody left", 3) == 3
