"""traced: a module as a torch.fx graph, which is pickled without the module's class."""

from __future__ import annotations

from torch import fx, nn


def traced(module: nn.Module) -> fx.GraphModule:
    """Return a torch.fx.GraphModule that computes this module's forward, with the same buffers.

    Only torch is needed to load it, and for torch.export, torch.jit and ONNX.

    Example:
        >>> import torch
        >>> class Half(nn.Module):
        ...     def forward(self, x):
        ...         return x / 2
        >>> traced(Half())(torch.ones(2))
        tensor([0.5000, 0.5000])
    """
    graph = fx.Tracer().trace(module)
    for node in graph.nodes:
        node.type = None  # string annotations cannot be pickled
    new = fx.GraphModule(module, graph, type(module).__name__)
    new._non_persistent_buffers_set |= module._non_persistent_buffers_set
    return new
