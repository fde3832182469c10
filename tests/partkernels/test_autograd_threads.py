"""Objects passed to threads of backward passes stay alive, even if PyTorch releases them once too often."""

import ctypes
import sys

import pytest
import torch

from partkernels import autograd_threads
from partkernels.autograd_threads import hand_on, handed_on

ROUNDS = 100
COUNTED = torch._C._stash_obj_in_tls


def borrow(name: str, value: object) -> None:
    """Emulate PyTorch 2.11, which releases a reference that it does not own."""
    COUNTED(name, value)
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(value))


@pytest.fixture(params=["this PyTorch", "one that borrows"])
def _pytorch(request, monkeypatch):
    if request.param == "one that borrows" and not autograd_threads._BORROWS:
        monkeypatch.setattr(torch._C, "_stash_obj_in_tls", borrow)
        monkeypatch.setattr(autograd_threads, "_BORROWS", autograd_threads._borrows())
        assert autograd_threads._BORROWS
    yield
    hand_on("a test", None)


@pytest.mark.usefixtures("_pytorch")
def test_a_handed_on_value_is_referenced_once():
    value = object()
    before = sys.getrefcount(value)
    for _ in range(ROUNDS):
        hand_on("a test", value)
        assert handed_on("a test") is value
    assert sys.getrefcount(value) == before + 1
    hand_on("a test", None)
    assert sys.getrefcount(value) == before


def test_a_missing_value_is_the_callers_default():
    assert handed_on("what nobody left") is None
    assert handed_on("what nobody left", 3) == 3
