"""Moving the content of images by affine maps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partnets.hyper.augmentation import Augmentation, FixedDraws


def resample(x: Tensor, matrix: Tensor) -> Tensor:
    """Each pixel takes x's value at the place to which the matrix sends it: bilinear, zeros outside.

    Coordinates start at the image's centre, with x to the right and y downwards, and their unit is half the image's
    width, for both axes: a rotation is one in pixel space, whatever the image's shape. A pixel is a square, of which
    the coordinates are the centre's (align_corners=False).

    Args:
        x: [batch, channels, height, width], floating point.
        matrix: [batch, 2, 3], affine; the inverse of how the content moves.

    Returns:
        Like x.

    Example:
        >>> twice_as_large = torch.tensor([[[0.5, 0.0, 0.0], [0.0, 0.5, 0.0]]])
        >>> resample(torch.eye(4).view(1, 1, 4, 4), twice_as_large)[0, 0, 0]
        tensor([0.6250, 0.5625, 0.1875, 0.0000])
    """
    if x.shape[0] == 0:  # torch's grids are never empty
        return x
    aspect = x.shape[-2] / x.shape[-1]
    to_normalised = matrix.new_tensor([[1.0, aspect, 1.0], [1 / aspect, 1.0, 1 / aspect]])
    grid = F.affine_grid(matrix * to_normalised, x.shape, align_corners=False)
    # Images in half precision are sampled in the matrix's, as places need more bits than brightnesses.
    sampled = F.grid_sample(x.to(grid.dtype), grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return sampled.to(x.dtype)


def warp(x: Tensor, exponent: Tensor) -> Tensor:
    """Moves the content of images by exp(exponent), resampled as above.

    Args:
        x: [batch, channels, height, width], floating point.
        exponent: [batch, 3, 3], a combination of hyper.affine.GENERATORS.

    Returns:
        Like x.

    Example:
        >>> import math
        >>> from partnets.hyper.affine import GENERATORS
        >>> half_turn = math.pi * torch.tensor([GENERATORS["rotation"]])
        >>> warp(torch.arange(4.0).view(1, 1, 2, 2), half_turn).round().abs()
        tensor([[[[3., 2.],
                  [1., 0.]]]])
    """
    return resample(x, exponential(exponent))


def exponential(exponent: Tensor) -> Tensor:
    """What `resample` takes, [batch, 2, 3], to move the content by exp(exponent), [batch, 3, 3]."""
    return torch.linalg.matrix_exp(-exponent)[:, :2]


class Warp(Augmentation):
    """An augmentation that moves each image by an affine map, which depends on the draws alone."""

    def matrices(self, draws: Tensor) -> Tensor:
        """What `resample` takes, [batch, 2, 3], for draws [batch, n]."""
        raise NotImplementedError(f"{type(self).__name__} has no matrices(draws); define it.")

    def transform(self, x: Tensor, draws: Tensor) -> Tensor:
        """forward with given draws in [-1, 1], [batch, n]."""
        return resample(x, self.matrices(draws))

    def fixed(self, draws: Tensor) -> FixedDraws:
        """As of any augmentation; matrices are computed once, and ONNX has no matrix exponential."""
        with torch.no_grad():
            return FixedDraws(_Resample(), self.matrices(draws))


class _Resample(nn.Module):
    def transform(self, x: Tensor, matrices: Tensor) -> Tensor:
        return resample(x, matrices)
