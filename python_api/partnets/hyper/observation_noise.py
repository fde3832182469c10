"""ObservationNoise: regression with a Gaussian likelihood, whose standard deviation is learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from partnets.hyper.hyperparameter import Hyperparameter
from partnets.hyper.learned import Learned
from partnets.hyper.ranges import positive


class Gaussian(NamedTuple):
    """The distribution that a regression predicts; both of the shape of the targets."""

    mean: Tensor
    variance: Tensor


class ObservationNoise(Hyperparameter):
    """Makes a normal distribution of what a network predicts: p(y | x) = N(y; network(x), std^2), with a learned std.

    Put it behind a network for regression and train with hyper.gaussian_nll: a squared error alone is no likelihood,
    and says nothing of how large an error counts. Trained on unseen chunks, std is the error that the network makes
    there.

    Args:
        std: the initial standard deviation, in the units of the targets; or one for each entry of their last dimension.

    Attributes:
        std: hyper.Learned, a number or n of them.

    Shapes:
        mean [batch, ...] to a Gaussian of mean and variance, both [batch, ...].

    Raises:
        ValueError: a std is not positive.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 1), ObservationNoise(0.5))
        >>> output = model(torch.zeros(3, 4))
        >>> output.mean.shape, output.variance[0].item()
        (torch.Size([3, 1]), 0.25)
        >>> gaussian_nll(output, torch.zeros(3, 1)).shape
        torch.Size([])
    """

    per_example = True

    def __init__(self, std: float | Sequence[float] = 1.0) -> None:
        super().__init__()
        self.std = Learned(std, positive)

    def forward(self, mean: Tensor) -> Gaussian:
        return Gaussian(mean, self.std(mean).to(mean.dtype).square().expand_as(mean))

    def to_ordinary(self) -> nn.Module:
        """What is deployed predicts the mean; its buffer `std` has the standard deviation that was learned.

        Example:
            >>> ObservationNoise(0.5).to_ordinary().std
            tensor(0.5000)
        """
        ordinary = nn.Identity()
        ordinary.register_buffer("std", self.std().detach().clone())
        return ordinary


def gaussian_nll(output: Gaussian, y: Tensor) -> Tensor:
    """The negative log-likelihood of targets under hyper.ObservationNoise's output, the mean over examples, in nats.

    Entries of one example add up.

    Raises:
        ValueError: y has another shape than the mean: torch would broadcast [n] and [n, 1] to [n, n].

    Example:
        >>> import torch
        >>> gaussian_nll(Gaussian(torch.zeros(2, 3), torch.ones(2, 3)), torch.zeros(2, 3))  # 3 log(2 pi) / 2
        tensor(2.7568)
    """
    if output.mean.shape != y.shape:
        raise ValueError(f"y is {list(y.shape)} and the prediction {list(output.mean.shape)}; give them one shape.")
    nll = ((y - output.mean).square() / output.variance + output.variance.log() + math.log(2 * math.pi)) / 2
    return nll.flatten(1).sum(1).mean() if nll.dim() > 1 else nll.mean()
