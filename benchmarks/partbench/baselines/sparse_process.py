"""SparseProcess: Gaussian processes on features, averaged over copies of each example."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

# Added to the covariance of the inducing values, relative to the process's variance, so that it has a Cholesky root.
JITTER = 1e-4
VARIANCE = 10.0


class SparseProcess(nn.Module):
    """A Gaussian process f for each class: the mean over copies of x of a g with squared exponential covariance.

    Each process has values at inducing points with a learned distribution (Hensman et al. 2015), in coordinates in
    which the prior is N(0, 1). Averaging gives a prior over functions that are invariant to the augmentation (van der
    Wilk et al. 2018): the wider it is, the fewer inputs f can distinguish.

    Args:
        inducing: [m, features], the initial inducing points.
        classes: the number of processes, which share covariance and inducing points.

    Raises:
        ValueError: half of the points or more coincide, so that the initial length scale would be 0.

    Example:
        >>> process = SparseProcess(torch.randn(5, 8), classes=3)
        >>> mean, variance = process(torch.randn(2, 4, 8))  # four copies of two examples
        >>> mean.shape, variance.shape, process.divergence().item()
        (torch.Size([2, 3]), torch.Size([2, 3]), 0.0)
    """

    def __init__(self, inducing: Tensor, classes: int) -> None:
        super().__init__()
        points, distances = len(inducing), torch.pdist(inducing)
        length = distances.median() if points > 1 else inducing.new_ones(())
        if not length > 0:
            raise ValueError("half of the inducing points or more have the same features; is the network dead?")
        self.inducing = nn.Parameter(inducing.clone())
        self.log_length = nn.Parameter(length.log())
        self.log_variance = nn.Parameter(torch.full_like(length, math.log(VARIANCE)))
        self.mean = nn.Parameter(inducing.new_zeros(classes, points))
        self.root = nn.Parameter(torch.eye(points, device="cpu").to(inducing).repeat(classes, 1, 1))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and variances of f, [batch, classes] each, for features [batch, copies, features]."""
        points = self.covariance(self.inducing, self.inducing)
        jitter = JITTER * self.log_variance.exp() * torch.eye(len(points), device="cpu").to(points)
        cross = self.covariance(self.inducing, features.flatten(0, 1)).unflatten(1, features.shape[:2]).mean(2)
        cross = torch.linalg.solve_triangular(torch.linalg.cholesky(points + jitter), cross, upper=False)
        rest = self.covariance(features, features).mean((1, 2)) - cross.square().sum(0)
        learned = (self.root.tril().mT @ cross).square().sum(1)
        return (self.mean @ cross).mT, (rest.clamp_min(0) + learned).mT

    def covariance(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the covariance of g at a [..., n, features] and b [..., m, features]: [..., n, m]."""
        squares = a.square().sum(-1)[..., :, None] + b.square().sum(-1)[..., None, :] - 2 * a @ b.mT
        return (self.log_variance - squares.clamp_min(0) / (2 * self.log_length).exp() / 2).exp()

    def divergence(self) -> Tensor:
        """Return the KL divergence of the inducing values' distribution from their prior, in nats: a scalar."""
        root = self.root.tril()
        squares = root.square().sum() + self.mean.square().sum() - self.mean.numel()
        return squares / 2 - root.diagonal(dim1=1, dim2=2).abs().log().sum()
