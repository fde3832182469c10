"""InThread: a thread-local value that also applies in the backward passes that its thread starts."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from partkernels.autograd_threads import hand_on, handed_on

# The key under which torch hands values on to its backward threads, which recompute activation checkpoints.
HANDED_ON = "partnets.in_thread"


class InThread(threading.local):
    """A value of the present thread; None outside of `holding`. Copies and pickles have no value."""

    def __init__(self) -> None:
        # An instance attribute: the compiler guards on it, but would miss one that later hides a class attribute.
        self.now: Any = None

    def __reduce__(self) -> tuple[type[InThread], tuple[()]]:
        return InThread, ()

    def get(self) -> Any:
        """Return the value, or None."""
        if self.now is not None or torch.compiler.is_compiling():
            return self.now
        return handed_on(HANDED_ON, {}).get(self)


# Whether each example of a call has its own subnetwork.
SEVERAL = InThread()


@contextmanager
def holding(values: Mapping[InThread, Any]) -> Iterator[None]:
    """Set values in the context, for this thread, and restore them on exit; contexts may end in any order."""
    before = {one: one.now for one in values}
    _hold(values)
    try:
        yield
    finally:
        _hold(before)


def _hold(values: Mapping[InThread, Any]) -> None:
    now = {**handed_on(HANDED_ON, {}), **values}
    hand_on(HANDED_ON, {one: value for one, value in now.items() if value is not None})
    for one, value in values.items():
        one.now = value
