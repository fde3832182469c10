"""InTraining: what is done in training alone, though its module does it always."""

from __future__ import annotations

from torch import Tensor, nn

from partnets.hyper.hyperparameter import Hyperparameter


class InTraining(Hyperparameter):
    """Does in training what a module does, and in evaluation nothing.

    Augmentations of partnets.hyper are drawn in inference too, since ψ learns from unseen data through the forward
    pass. partnets.stn learns through the best response, and judges by data as they are.

    Args:
        module: a module of partnets.hyper, of one argument.

    Attributes:
        module: the same object.

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
                f"module is a {type(module).__name__}; pass a partnets.hyper.Hyperparameter. What averages a network's"
                " outputs has the network inside, and is none."
            )
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x) if self.training else x

    def to_ordinary(self) -> nn.Module:
        """Nothing: what is deployed is in evaluation mode."""
        return nn.Identity()
