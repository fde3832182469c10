"""eagerly: uncompiled execution of code that torch.compile has compiled."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import torch


def eagerly() -> AbstractContextManager[None]:
    """Return a context in which code compiled by torch.compile runs uncompiled, as for passes with hooks.

    Example:
        >>> compiled = torch.compile(lambda x: torch.compiler.is_compiling(), backend="eager")
        >>> with eagerly():
        ...     compiled(torch.ones(1))
        False
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; importing it would take 2 s and 160 MB
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
