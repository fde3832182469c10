"""Averaged: a network's prediction, averaged over augmented copies of its input."""

from __future__ import annotations

import math

from torch import Tensor, nn

from partnets.hyper.augmentation import Augmentation

AVERAGES = ("logits", "log_probabilities", "probabilities")


class Averaged(nn.Module):
    """A network applied to several augmented copies of each example and averaged, in training and inference (App. I.4).

    Args:
        augmentation: maps [n, ...] to [n, ...] with a separate draw for each example, such as hyper.Affine.
        network: maps [n, ...] to logits [n, classes, ...].
        samples: S, the number of copies.
        average: the averaged quantity: 'logits' (as in Immer et al. 2022), 'log_probabilities' (as in Benton et al.
            2020), or 'probabilities' (as in Schwöbel et al. 2021), which returns their logarithms. All are valid inputs
            of F.cross_entropy, which normalises them, so that 'log_probabilities' gives the same loss as 'logits'.
            With F.nll_loss, the two differ.

    Shapes:
        x [batch, ...]; returns [batch, classes, ...]. The network receives S * batch examples, x repeated S times.

    Raises:
        ValueError: samples is below 1, average is unknown, or augmentation and network are swapped.

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
