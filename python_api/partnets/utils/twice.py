"""twice_differentiable: replacements for functions with a missing or wrong second derivative in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Give weight norm and scaled dot-product attention correct second derivatives in the context.

    PyTorch's fused attention lacks them, and those of torch._weight_norm on a CPU are wrong (up to 2.13).
    """
    with sdpa_kernel(SDPBackend.MATH), _Composed():
        yield


class _Composed(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        function = _weight_norm if function is torch._weight_norm else function
        return function(*args, **(kwargs or {}))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Compute torch._weight_norm, g v / |v|, with a norm for each index of `dim`; -1 is one norm over all entries."""
    others = [i for i in range(v.dim()) if i != dim]
    return v * (g / torch.linalg.vector_norm(v, dim=others, keepdim=True))
