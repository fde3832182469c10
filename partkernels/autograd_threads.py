"""Named objects that PyTorch passes from a thread to the threads that run its backward passes."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch


def handed_on(name: str, otherwise: Any = None) -> Any:
    """Return the value that `hand_on` set in this thread or in the thread that started its backward pass."""
    return torch._C._get_obj_in_tls(name) if torch._C._is_key_in_tls(name) else otherwise


def hand_on(name: str, value: Any) -> None:
    """Set a named value, replacing any earlier one, for this thread and the backward passes that it starts.

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
    """Return whether this PyTorch releases a reference that it does not own, which would free a live object.

    PyTorch 2.11 does, 2.13 does not.
    """
    probe = object()
    _count_one_more(probe)  # compensates if PyTorch releases one too many
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls("partkernels.probe", probe)
    return sys.getrefcount(probe) == before


_BORROWS = _borrows()
