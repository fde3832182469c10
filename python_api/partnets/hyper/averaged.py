"""Averaged: a network's prediction, averaged over augmented copies of its input."""

from __future__ import annotations

from torch import Tensor, nn

from partnets.hyper.augmentation import Augmentation


class Averaged(nn.Module):
    """A network whose logits are averaged over augmented copies of each example, in training and inference.

    See Appendix I.4 and Immer et al. (2022).

    Args:
        augmentation: maps [n, ...] to [n, ...] with a separate draw for each example, such as hyper.Affine.
        network: maps [n, ...] to logits [n, classes, ...].
        samples: S, the number of copies.

    Shapes:
        x [batch, ...]; returns [batch, classes, ...]. The network receives S * batch examples, x repeated S times.

    Raises:
        ValueError: samples is below 1, or augmentation and network are swapped.

    Example:
        >>> import torch
        >>> from partnets import hyper
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        >>> Averaged(hyper.Affine(), network, samples=4)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self, augmentation: nn.Module, network: nn.Module, *, samples: int = 8) -> None:
        super().__init__()
        if isinstance(network, Augmentation) and not isinstance(augmentation, Augmentation):
            raise ValueError(
                f"network is a {type(network).__name__} and augmentation a {type(augmentation).__name__}; pass"
                " Averaged(augmentation, network)."
            )
        if samples < 1:
            raise ValueError(f"samples={samples}; pass at least 1.")
        self.augmentation, self.network, self.samples = augmentation, network, samples

    def forward(self, x: Tensor) -> Tensor:
        copies = x.expand(self.samples, *x.shape).flatten(0, 1)
        logits = self.network(self.augmentation(copies)).unflatten(0, (self.samples, x.shape[0]))
        return logits.mean(0)

    def extra_repr(self) -> str:
        return f"samples={self.samples}"
