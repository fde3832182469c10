"""Moving the content of images by affine maps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
    return resample(x, torch.linalg.matrix_exp(-exponent)[:, :2])
