"""InThread: a value that holds in one thread, and in the backward passes that this thread starts."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from partkernels.autograd_threads import hand_on, handed_on

# What torch hands on to threads that run backward passes, in which activation checkpoints compute anew.
HANDED_ON = "partnets.in_thread"


class InThread(threading.local):
    """A value of the present thread; None outside of `holding`. Copies and pickles have none.

    Example:
        >>> import threading
        >>> value, seen = InThread(), []
        >>> with holding({value: 3}):
        ...     thread = threading.Thread(target=lambda: seen.append(value.get()))
        ...     thread.start(), thread.join()
        ...     value.get()
        (None, None)
        3
        >>> seen, value.get()
        ([None], None)
    """

    def __init__(self) -> None:
        # Of the instance: the compiler guards on what it finds there, and would overlook what comes before the class's.
        self.now: Any = None

    def __reduce__(self):
        return InThread, ()

    def get(self) -> Any:
        """The value, or None."""
        if self.now is not None or torch.compiler.is_compiling():
            return self.now
        return handed_on(HANDED_ON, {}).get(self)


# Whether each example of a call has a subnetwork of its own.
SEVERAL = InThread()


@contextmanager
def holding(values: Mapping[InThread, Any]) -> Iterator[None]:
    """Inside, in this thread, each has this value; afterwards that of before. Contexts may end in any order."""
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
