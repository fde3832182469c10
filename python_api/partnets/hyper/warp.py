"""Affine warps of images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partnets.hyper.augmentation import Augmentation, FixedDraws

# exp(x) = exp(x / 2**HALVINGS)**(2**HALVINGS), and the degree of the Taylor polynomial for the latter.
HALVINGS, DEGREE = 4, 18


def resample(x: Tensor, matrix: Tensor) -> Tensor:
    """Sample x, for each pixel, at the position to which the matrix maps it: bilinear, with zeros outside.

    The origin of coordinates is the image's centre, x points right and y down, and the unit of both axes is half the
    image's width, so that rotations are rotations in pixel space for any aspect ratio. A pixel's coordinates are those
    of its centre (align_corners=False).

    Args:
        x: [batch, channels, height, width], floating point.
        matrix: [batch, 2, 3], affine; the inverse of the content's motion.

    Returns:
        A tensor like x.

    Example:
        >>> twice_as_large = torch.tensor([[[0.5, 0.0, 0.0], [0.0, 0.5, 0.0]]])
        >>> resample(torch.eye(4).view(1, 1, 4, 4), twice_as_large)[0, 0, 0]
        tensor([0.6250, 0.5625, 0.1875, 0.0000])
    """
    if x.shape[0] == 0:  # F.affine_grid raises for an empty batch
        return x
    aspect = x.shape[-2] / x.shape[-1]
    if aspect != 1:
        to_normalised = matrix.new_ones(2, 3)  # not new_tensor, for which a GPU would be waited for
        to_normalised[0, 1].fill_(aspect)
        to_normalised[1, ::2].fill_(1 / aspect)
        matrix = matrix * to_normalised
    grid = F.affine_grid(matrix, x.shape, align_corners=False)
    # Half-precision images are sampled in the matrix's dtype, as coordinates need more bits than brightness.
    sampled = F.grid_sample(x.to(grid.dtype), grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return sampled.to(x.dtype)


def warp(x: Tensor, exponent: Tensor) -> Tensor:
    """Move the content of images by exp(exponent), by `resample`.

    Args:
        x: [batch, channels, height, width], floating point.
        exponent: [batch, 3, 3], a linear combination of hyper.affine.GENERATORS.

    Returns:
        A tensor like x.

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
    """Return the matrix [batch, 2, 3] for `resample` that moves the content by exp(exponent), [batch, 3, 3].

    torch.linalg.matrix_exp looks at the exponents to choose a polynomial, and so waits for a GPU. This is one
    polynomial for all, in float64: exact to float32's rounding up to norms of 30, while half a turn has a norm of 3.2.
    """
    scaled = -exponent.double() / 2**HALVINGS
    one = torch.eye(3, dtype=scaled.dtype, device=scaled.device).expand_as(scaled)
    power = one
    for n in range(DEGREE, 0, -1):
        power = torch.baddbmm(one, scaled, power, alpha=1 / n)
    for _ in range(HALVINGS):
        power = power @ power
    return power[:, :2].to(exponent.dtype)


class Warp(Augmentation):
    """An augmentation that moves each image by an affine map, which depends only on the draws."""

    def matrices(self, draws: Tensor) -> Tensor:
        """Return the matrices [batch, 2, 3] for `resample`, for draws [batch, n]."""
        raise NotImplementedError(f"{type(self).__name__} has no matrices(draws); define it.")

    def transform(self, x: Tensor, draws: Tensor) -> Tensor:
        """Transform x by given draws in [-1, 1], [batch, n]."""
        return resample(x, self.matrices(draws))

    def fixed(self, draws: Tensor) -> FixedDraws:
        """Return fixed draws with precomputed matrices, as ONNX has no matrix exponential."""
        with torch.no_grad():
            return FixedDraws(_Resample(), self.matrices(draws))


class _Resample(nn.Module):
    def transform(self, x: Tensor, matrices: Tensor) -> Tensor:
        return resample(x, matrices)
