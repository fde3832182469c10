"""shown: what a module's own parameters are outside of any subnetwork, into which nobody may write."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from partnets.utils.traced import is_traced

# Of each module its parameters that were read, and their versions then.
_shown: WeakKeyDictionary[nn.Module, dict[str, tuple[Tensor, int]]] = WeakKeyDictionary()


def show(module: nn.Module, name: str, value: Tensor) -> None:
    """Notes a parameter that is read. It is computed of its partitions' rows, and what is written into it is lost."""
    if is_traced() or value.is_inference():
        return
    check_unwritten(module)
    _shown.setdefault(module, {})[name] = value, value._version


def check_unwritten(module: nn.Module) -> None:
    """Raises RuntimeError if what was read of a module's own parameters has been written into since.

    Example:
        >>> import torch, partnets
        >>> class Scale(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.scale = nn.Parameter(torch.tensor(3.0))
        ...     def forward(self, x):
        ...         return self.scale * x
        >>> model = partnets.partition(Scale(), (0.5, 0.5))
        >>> with torch.no_grad():
        ...     _ = model.scale.clamp_(max=2.0)
        >>> check_unwritten(model)
        Traceback (most recent call last):
        RuntimeError: the scale of Scale was written into, which ...
    """
    if torch.compiler.is_compiling() or not _shown:
        return
    for name, (value, version) in _shown.pop(module, {}).items():
        if value._version != version:
            kind = type(module).__name__
            raise RuntimeError(
                f"the {name} of {kind} was written into, which is lost: it is the sum of rows, one for each partition."
                " Clamp it in forward, where it is read; or write into the rows, which model.named_parameters() has."
            )
