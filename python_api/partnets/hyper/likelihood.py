"""Temperature, ObservationNoise and losses: calibrated predictions at the end of a network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from torch import Tensor, nn

from partnets.hyper.hyperparameter import Hyperparameter
from partnets.hyper.learned import Learned
from partnets.hyper.ranges import Range, positive
from partnets.hyper.tracing import traced
from partnets.utils.losses import IGNORED


class Temperature(Hyperparameter):
    """A layer that divides logits by T (Guo et al. 2017), learned from held-out data.

    Put it at the end of a classifier. It learns directly, as it affects predictions.

    Args:
        temperature: the initial T.
        range: range of T.

    Shapes:
        logits [batch, classes, ...]; returns the same shape.

    Raises:
        ValueError: temperature is outside the range.

    Example:
        >>> import torch
        >>> Temperature(2.0)(torch.tensor([[2.0, 4.0]]))
        tensor([[1., 2.]], grad_fn=<DivBackward0>)
    """

    per_example = True

    def __init__(self, temperature: float = 1.0, *, range: Range = positive) -> None:
        super().__init__()
        range.check("temperature", temperature)
        self.temperature = Learned(temperature, range)

    def forward(self, logits: Tensor) -> Tensor:
        return logits / self.temperature(logits)

    def to_torch(self) -> nn.Module:
        """Return a module that divides by the learned T."""
        return traced(_Quotient(self.temperature().detach()))


class _Quotient(nn.Module):
    def __init__(self, temperature: Tensor) -> None:
        super().__init__()
        self.register_buffer("temperature", temperature)

    def forward(self, logits: Tensor) -> Tensor:
        return logits / self.temperature


class Gaussian(NamedTuple):
    """The predicted distribution of a regression; both tensors have the shape of the targets."""

    mean: Tensor
    variance: Tensor

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"the output of hyper.ObservationNoise has a mean and a variance, and no {name}; pass"
            " loss=hyper.gaussian_nll."
        )


class ObservationNoise(Hyperparameter):
    """A layer that makes the prediction of a regression network Gaussian: p(y | x) = N(y; network(x), std^2).

    Put it at the end of the network and train with hyper.gaussian_nll. A squared error is not a likelihood, as it does
    not define the scale of errors. Trained on held-out chunks, std is the network's error there.

    Args:
        std: the initial standard deviation, in units of the targets; or one for each entry of their last dimension.

    Attributes:
        std: hyper.Learned, a number or n of them.

    Shapes:
        mean [batch, ...]; returns a Gaussian with mean and variance, both [batch, ...].

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

    def to_torch(self) -> nn.Module:
        """Return a module that passes the mean through, with the learned standard deviation in its buffer `std`.

        Example:
            >>> ObservationNoise(0.5).to_torch().std
            tensor(0.5000)
        """
        identity = nn.Identity()
        identity.register_buffer("std", self.std().detach().clone())
        return identity


def gaussian_nll(output: Gaussian, y: Tensor) -> Tensor:
    """Return the negative log-likelihood of targets under a Gaussian, in nats, as the mean over examples.

    The entries of an example are summed.

    Raises:
        TypeError: the output has no mean.
        ValueError: y and the mean have different shapes; torch would broadcast [n] and [n, 1] to [n, n].

    Example:
        >>> import torch
        >>> gaussian_nll(Gaussian(torch.zeros(2, 3), torch.ones(2, 3)), torch.zeros(2, 3))  # 3 log(2 pi) / 2
        tensor(2.7568)
    """
    if not isinstance(getattr(output, "mean", None), Tensor):
        raise TypeError(
            f"the output is a {type(output).__name__} without mean and variance; end the network with"
            " hyper.ObservationNoise, or return a torch.distributions.Normal."
        )
    if output.mean.shape != y.shape:
        raise ValueError(f"y is {list(y.shape)} and the prediction {list(output.mean.shape)}; give them one shape.")
    nll = ((y - output.mean).square() / output.variance + output.variance.log() + math.log(2 * math.pi)) / 2
    return nll.flatten(1).sum(1).mean() if nll.dim() > 1 else nll.mean()


def expected_error(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of 1 - p(y | x), to use as `hyper_loss` if held-out data may have wrong labels.

    If labels are replaced uniformly at random, this loss changes only by a factor and a constant, so its minimum and
    the direction of its gradient stay the same (Ghosh, Kumar and Sastry 2017). The likelihood, in contrast, is then
    highest for a network that is as uncertain as the labels are.

    Args:
        logits: [batch, classes].
        labels: int64 [batch]; examples with -100 are left out.

    Returns:
        A scalar in [0, 1].

    Example:
        >>> import torch
        >>> expected_error(torch.zeros(3, 4), torch.tensor([0, 1, 2]))
        tensor(0.7500)
    """
    counts = labels != IGNORED
    return 1 - logits[counts].softmax(1).gather(1, labels[counts][:, None]).mean()
