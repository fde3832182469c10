"""Cutout: blanked squares in images, in learned number and size."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partnets.hyper.hyperparameter import Hyperparameter
from partnets.hyper.learned import Learned
from partnets.hyper.ranges import interval


class Cutout(Hyperparameter):
    """A layer that blanks random squares of each image in training (DeVries and Taylor 2017).

    The number of squares and their side length are the learned values, rounded down. Rounding has no gradient, so
    partnets.stn learns them through the best response. Squares with a centre near the border extend beyond it.

    Args:
        holes: the initial number of squares, between 0 and most_holes.
        length: the initial side length in pixels, between 0 and most_length.
        most_holes, most_length: the upper limits, excluded: 4 and 24 in the published runs on CIFAR-10.

    Shapes:
        x [batch, channels, height, width]; returns the same shape.

    Raises:
        ValueError: an initial value is outside its limits, or x does not have four dimensions.

    Example:
        >>> cutout = Cutout(holes=1.5, length=2.5)
        >>> blank = cutout(torch.ones(4, 1, 8, 8)) == 0
        >>> blank.sum((1, 2, 3)).tolist() == [4, 4, 4, 4] or int(blank.sum()) < 16  # less at a border
        True
    """

    per_example = True
    only_in_training = True

    def __init__(
        self, holes: float = 1.5, length: float = 4.5, *, most_holes: float = 4.0, most_length: float = 24.0
    ) -> None:
        super().__init__()
        of_holes, of_length = interval(0.0, most_holes), interval(0.0, most_length)
        of_holes.check("holes", holes)
        of_length.check("length", length)
        self.holes, self.length = Learned(holes, of_holes), Learned(length, of_length)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4:
            raise ValueError(f"x is {list(x.shape)}; pass images [batch, channels, height, width].")
        if not self.training:
            return x
        batch, _, height, width = x.shape
        most = int(self.holes.range.high)
        # [batch, holes, height, width] by broadcasting.
        holes, length = (one(x).detach().floor() for one in (self.holes, self.length))
        there = torch.arange(most, device=x.device).view(1, -1, 1, 1) < holes
        rows, cols = (
            _covered(torch.randint(max(size, 1), (batch, most, 1), device=x.device), length.view(-1, 1, 1), size)
            for size in (height, width)
        )
        blank = (rows[..., :, None] & cols[..., None, :] & there).any(1, keepdim=True)
        return x.masked_fill(blank, 0.0)

    def to_torch(self) -> nn.Module:
        """Return nn.Identity()."""
        return nn.Identity()


def _covered(centre: Tensor, length: Tensor, size: int) -> Tensor:
    """Return which of `size` pixels a side of this length around a centre covers, as bool [batch, holes, size]."""
    offset = torch.arange(size, device=centre.device) - centre + length.div(2, rounding_mode="floor")
    return (offset >= 0) & (offset < length)
