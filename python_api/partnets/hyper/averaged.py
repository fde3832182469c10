"""Averaged: a network's prediction, averaged over several draws of an augmentation."""

from __future__ import annotations

import math

from torch import Tensor, nn

from partnets.hyper.augmentation import Augmentation

AVERAGES = ("logits", "log_probabilities", "probabilities")


class Averaged(nn.Module):
    """Runs a network on several augmented copies of each example and averages, in training and inference (App. I.4).

    Args:
        augmentation: maps [n, ...] to [n, ...] with a draw of its own for each example, as hyper.Affine does.
        network: maps [n, ...] to logits [n, classes, ...].
        samples: S, the number of copies.
        average: of what: 'logits' (as Immer et al. 2022), 'log_probabilities' (as Benton et al. 2020), or
            'probabilities' (as Schwöbel et al. 2021), which returns their logarithms. All go into F.cross_entropy. It
            normalises, for which 'log_probabilities' is then the same as 'logits'; with F.nll_loss it is not.

    Shapes:
        x [batch, ...] to [batch, classes, ...]; the network sees S * batch examples, the copies of x after one another.

    Raises:
        ValueError: samples is below 1, average is none of the three, or augmentation and network are swapped.

    Example:
        >>> import torch
        >>> from partnets import hyper
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        >>> Averaged(hyper.Affine(), network, samples=4)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, augmentation: nn.Module, network: nn.Module, *, samples: int = 8, average: str = "logits"
    ) -> None:
        super().__init__()
        if isinstance(network, Augmentation) and not isinstance(augmentation, Augmentation):
            raise ValueError(
                f"network is a {type(network).__name__} and augmentation a {type(augmentation).__name__}; pass"
                " Averaged(augmentation, network)."
            )
        if samples < 1:
            raise ValueError(f"samples={samples}; pass at least 1.")
        if average not in AVERAGES:
            raise ValueError(f"average={average!r}; pass one of {', '.join(AVERAGES)}.")
        self.augmentation, self.network = augmentation, network
        self.samples, self.average = samples, average

    def forward(self, x: Tensor) -> Tensor:
        copies = x.expand(self.samples, *x.shape).flatten(0, 1)
        logits = self.network(self.augmentation(copies)).unflatten(0, (self.samples, x.shape[0]))
        if self.average == "logits":
            return logits.mean(0)
        log_probabilities = logits.log_softmax(2)
        if self.average == "log_probabilities":
            return log_probabilities.mean(0)
        return log_probabilities.logsumexp(0) - math.log(self.samples)

    def extra_repr(self) -> str:
        return f"samples={self.samples}, average={self.average!r}"
