"""InTraining: a module applied in training only."""

from __future__ import annotations

from torch import Tensor, nn

from partnets.hyper.hyperparameter import Hyperparameter


class InTraining(Hyperparameter):
    """A wrapper that applies a module in training mode and passes x through in evaluation mode.

    Augmentations of partnets.hyper are also drawn in inference, because ψ learns from held-out data through the forward
    pass. partnets.stn learns through the best response instead, and judges by unaugmented data.

    Args:
        module: a module of partnets.hyper with one argument.

    Attributes:
        module: the given module.

    Example:
        >>> import torch
        >>> from partnets import hyper
        >>> jitter = InTraining(hyper.ColourJitter())
        >>> x = torch.rand(2, 3, 8, 8)
        >>> torch.equal(jitter(x), x), torch.equal(jitter.eval()(x), x)
        (False, True)
    """

    hyper_gradient = "lookahead"

    def __init__(self, module: Hyperparameter) -> None:
        super().__init__()
        if not isinstance(module, Hyperparameter):
            raise TypeError(
                f"module is a {type(module).__name__}; pass a partnets.hyper.Hyperparameter. A hyper.Averaged has"
                " the network inside and is not one."
            )
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x) if self.training else x

    def to_torch(self) -> nn.Module:
        """Return nn.Identity()."""
        return nn.Identity()
