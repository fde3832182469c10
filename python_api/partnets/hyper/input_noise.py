"""InputNoise: normal noise of a learned standard deviation, added to inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partnets.hyper.hyperparameter import Hyperparameter
from partnets.hyper.learned import Learned, check_real
from partnets.hyper.ranges import Range, positive


class InputNoise(Hyperparameter):
    """A layer that adds normal noise to x in training; in partnets.stn, each example has its own standard deviation.

    Args:
        std: the initial standard deviation, in units of x.
        range: range of std, such as hyper.interval(0, 0.3).

    Shapes:
        x of any shape, floating point; returns the same shape.

    Raises:
        ValueError: std is outside the range.

    Example:
        >>> noise = InputNoise(0.5)
        >>> x = torch.zeros(2, 3)
        >>> noise(x).shape, torch.equal(noise.eval()(x), x)
        (torch.Size([2, 3]), True)
    """

    per_example = True
    only_in_training = True

    def __init__(self, std: float = 0.1, *, range: Range = positive) -> None:
        super().__init__()
        range.check("std", std)
        self.std = Learned(std, range)

    def forward(self, x: Tensor) -> Tensor:
        check_real(self, x)
        return x + self.std(x).to(x.dtype) * torch.randn_like(x) if self.training else x

    def to_torch(self) -> nn.Module:
        """Return nn.Identity()."""
        return nn.Identity()
