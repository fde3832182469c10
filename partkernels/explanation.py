"""explain: which backend and plan compute a call and its gradients, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from partkernels.backend import dispatch


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Run a call and its gradient, if it has one, and report the backend and plan of each product.

    Args:
        function: linear, conv2d, a module, or anything else that calls them; it must return a tensor.
        args, kwargs: the call's arguments.

    Returns:
        One line for each operator that ran: its name, the backend and why it was chosen, and likewise the plan, if the
        backend has several.

    Example:
        >>> import partkernels as pk
        >>> p = pk.Partition.random((4, 3), (0.5, 0.5), seed=0)
        >>> print(explain(pk.linear, torch.ones(2, 3), torch.ones(4, 3), p, active=1))
        linear: cpu (automatic: the first backend that serves torch.float32 on cpu)
    """
    with dispatch.noting() as notes:
        result = function(*args, **kwargs)
        if isinstance(result, Tensor) and result.requires_grad:
            with torch.autograd.set_multithreading_enabled(False):
                leaves = _leaves(result)
                torch.autograd.grad(result.sum(), leaves, allow_unused=True)
    return "\n".join(notes)


def _leaves(result: Tensor) -> list[Tensor]:
    """Return the tensors that the result depends on and that would receive a gradient."""
    leaves, seen, pending = [], set(), [result.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        pending += [parent for parent, _ in node.next_functions]
    return leaves
