"""The leaves of autograd graphs."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def reached(tensors: Iterable[Tensor]) -> set[Tensor]:
    """Return the leaves that tensors were computed from and that require a gradient.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 1)
        >>> reached([layer(torch.ones(2))]) == {layer.weight, layer.bias}
        True
    """
    leaves = {tensor for tensor in tensors if tensor.requires_grad and tensor.grad_fn is None}
    nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            leaves.add(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return leaves
