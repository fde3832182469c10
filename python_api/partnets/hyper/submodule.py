"""Submodule: any module as a hyperparameter, such as a feature extractor."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from partnets.hyper.hyperparameter import Hyperparameter


class Submodule(Hyperparameter):
    """A module with all its parameters as hyperparameters, which learn only from the out-of-chunk loss (Table 3).

    partnets.partition leaves it unchanged. Call it like the module. values() returns the root mean square of all
    parameters as 'rms', a single number for History.

    Args:
        module: a module with parameters, all of which its forward must use.

    Attributes:
        module: the same object.

    Raises:
        ValueError: the module has no parameters, or a normalisation layer in it has running statistics. Those would be
            updated from every chunk, and partnets.Trainer would freeze them.

    Example:
        >>> import torch
        >>> import partnets
        >>> features = Submodule(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU()))
        >>> model = partnets.partition(nn.Sequential(features, nn.Linear(8, 2)), (0.8, 0.2))
        >>> model(torch.zeros(5, 4)).shape, type(model[0].module[0]).__name__, list(features.values())
        (torch.Size([5, 2]), 'Linear', ['rms'])
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        if not any(True for _ in module.parameters()):
            raise ValueError(f"this {type(module).__name__} has no parameters to learn; use it without Submodule.")
        running = [
            f"{path or 'the module itself'} ({type(child).__name__})"
            for path, child in module.named_modules()
            if isinstance(child, _NormBase) and child.running_mean is not None
        ]
        if running:
            raise ValueError(
                f"running statistics would carry data between chunks: {', '.join(running)}; use nn.GroupNorm or"
                " nn.LayerNorm instead."
            )
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def to_torch(self) -> nn.Module:
        """Return the wrapped module."""
        return self.module

    def values(self) -> dict[str, float]:
        """Return the root mean square of all parameters."""
        parameters = [parameter.detach() for parameter in self.parameters()]
        count = sum(parameter.numel() for parameter in parameters)
        return {"rms": nn.utils.get_total_norm(parameters).item() / math.sqrt(count)}
