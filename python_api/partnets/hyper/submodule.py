"""Submodule: any module as a hyperparameter, such as a feature extractor."""

from __future__ import annotations

import math

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from partnets.hyper.hyperparameter import Hyperparameter


class Submodule(Hyperparameter):
    """Makes all parameters of a module hyperparameters: they learn from the out-of-chunk loss alone (Table 3).

    partnets.partition leaves it whole. Use it like the module: arguments and results pass through. values() gives the
    root mean square of all its parameters, as 'rms': a single number to follow in a History.

    Args:
        module: with at least one parameter, all of which its forward uses.

    Attributes:
        module: the same object.

    Raises:
        ValueError: the module has no parameters, or a normalisation in it keeps running statistics. Those would see
            every chunk through all steps, and partnets.Trainer would hold them fixed.

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
                " nn.LayerNorm, which have none."
            )
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def to_ordinary(self) -> nn.Module:
        """The module itself."""
        return self.module

    def values(self) -> dict[str, float]:
        """The root mean square of all parameters."""
        parameters = [parameter.detach() for parameter in self.parameters()]
        count = sum(parameter.numel() for parameter in parameters)
        return {"rms": nn.utils.get_total_norm(parameters).item() / math.sqrt(count)}
