"""Compiled code that runs as it is written."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_inside = 0
_before = None


@contextmanager
def eagerly() -> Iterator[None]:
    """Inside, what torch.compile has compiled runs uncompiled, in all threads.

    Hooks and marks are nothing to compile for. torch.compiler.set_stance alone leaves the stance of one behind
    where two threads are inside.

    Example:
        >>> compiled = torch.compile(lambda x: torch.compiler.is_compiling(), backend="eager")
        >>> with eagerly():
        ...     compiled(torch.ones(1))
        False
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled: it would take 2 s and 160 MB to say so
        yield
        return
    global _inside, _before
    with _lock:
        if not _inside:
            _before = torch.compiler.set_stance("force_eager")
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _before.__exit__(None, None, None)
