"""What PyTorch hands on from a thread to those that run its backward passes: an object for each name."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch


def handed_on(name: str, otherwise: Any = None) -> Any:
    """What `hand_on` left in this thread, or in the one that started the backward pass that runs in it."""
    return torch._C._get_obj_in_tls(name) if torch._C._is_key_in_tls(name) else otherwise


def hand_on(name: str, value: Any) -> None:
    """Leaves a value, in place of the last of this name, with this thread and the backward passes that it starts.

    Example:
        >>> hand_on("an example", 3)
        >>> handed_on("an example")
        3
    """
    if _BORROWS:
        _count_one_more(value)
    torch._C._stash_obj_in_tls(name, value)


def _count_one_more(value: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _borrows() -> bool:
    """Whether this PyTorch gives back a reference that it has not taken, and so frees what others hold.

    2.11 does, 2.13 does not.
    """
    probe = object()
    _count_one_more(probe)  # for a PyTorch that does
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls("partkernels.probe", probe)
    return sys.getrefcount(probe) == before


_BORROWS = _borrows()
