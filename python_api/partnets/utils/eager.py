"""eagerly: uncompiled execution of code that torch.compile has compiled."""

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
    """Run code compiled by torch.compile uncompiled in the context, in all threads.

    Passes with hooks and tracers are not worth compiling. torch.compiler.set_stance by itself would leave one thread's
    stance behind if two threads are in the context.

    Example:
        >>> compiled = torch.compile(lambda x: torch.compiler.is_compiling(), backend="eager")
        >>> with eagerly():
        ...     compiled(torch.ones(1))
        False
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; importing it would take 2 s and 160 MB
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
