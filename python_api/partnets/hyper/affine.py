"""Affine: random affine transformations of images by matrix exponentials, with learned widths."""

from __future__ import annotations

import math
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partnets.hyper.augmentation import Augmentation, FixedDraws
from partnets.hyper.learned import Learned
from partnets.hyper.ranges import positive

# As in Benton et al. (2020, Appendix A), in the coordinates of resample.
GENERATORS = {
    "translate_x": ((0, 0, 1), (0, 0, 0), (0, 0, 0)),
    "translate_y": ((0, 0, 0), (0, 0, 1), (0, 0, 0)),
    "rotation": ((0, 1, 0), (-1, 0, 0), (0, 0, 0)),
    "scale": ((1, 0, 0), (0, 1, 0), (0, 0, 0)),
    "stretch": ((1, 0, 0), (0, -1, 0), (0, 0, 0)),
    "shear": ((0, 1, 0), (1, 0, 0), (0, 0, 0)),
}
# Factors from user units to generator coefficients: fractions of the image's width, degrees, log-factors.
UNITS = dict.fromkeys(GENERATORS, 1.0) | {"translate_x": 2.0, "translate_y": 2.0, "rotation": math.pi / 180}
# Half-widths, as generator coefficients, that correspond to Augerino's width of 1.
HALVES = dict.fromkeys(GENERATORS, 0.5) | {"translate_x": 0.05, "translate_y": 0.05}
# exp(x) = exp(x / 2**HALVINGS)**(2**HALVINGS), and the degree of the Taylor polynomial for the latter.
HALVINGS, DEGREE = 4, 18


def resample(x: Tensor, matrix: Tensor) -> Tensor:
    """Sample images, for each pixel, at the position to which the matrix [batch, 2, 3] maps it, with zeros outside.

    The origin of coordinates is the image's centre, x points right and y down, and the unit of both axes is half the
    image's width, so that rotations are rotations in pixel space for any aspect ratio. A pixel's coordinates are those
    of its centre (align_corners=False).
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


def warp(x: Tensor, exponent: Tensor) -> Tensor:
    """Move the content of images by exp(exponent), [batch, 3, 3], a linear combination of GENERATORS."""
    return resample(x, exponential(exponent))


class Warp(Augmentation):
    """An augmentation that moves each image by an affine map, which depends only on the draws."""

    def matrices(self, draws: Tensor) -> Tensor:
        """Return a matrix for each image, [batch, 2, 3], for `resample`: from a pixel of the result to its place in x.

        Args:
            draws: [batch, n], numbers in [-1, 1], one for each transformation in `names`.
        """
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


class Affine(Warp):
    """A random affine transformation of each image, drawn at each call, in training and inference.

    For each image and generator G_i, t_i ~ U[-w_i / 2, w_i / 2], and the image moves by exp(sum_i t_i G_i) (Benton et
    al. 2020, Augerino). Each width w_i is the softplus of a learned parameter. As in Augerino's code, the generators of
    translations are scaled by 0.1. Unlike there, the border is at the outer pixels' edges, not at their centres
    (align_corners=False), as in the generation of rotated data sets. The partitioned networks' paper uses this
    parametrisation for fine-tuning (Table 2, Appendix I.4). Use hyper.Averaged to average a network over several draws.

    Args:
        translate_x, translate_y: initial half-widths as fractions of the image's width.
        rotation: initial half-width in degrees.
        scale, stretch, shear: as log-factors: e**scale times larger, e**stretch times wider and lower, and the same
            along the diagonals.
        For each: None leaves this transformation out.

    Attributes:
        widths: hyper.Learned, w_i for each transformation in use; values() returns half-widths.

    Shapes:
        x [batch, channels, height, width], floating point; returns the same shape.

    Raises:
        ValueError: a half-width is not positive, or all are None.

    Example:
        >>> augmentation = Affine(rotation=30.0, shear=None)
        >>> augmentation(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 1, 8, 8])
        >>> round(augmentation.values()["rotation"], 3)
        30.0
    """

    # The largest half-widths that partnets.tune tries.
    reach = MappingProxyType(
        dict.fromkeys(GENERATORS, 0.5) | {"translate_x": 0.25, "translate_y": 0.25, "rotation": 180.0}
    )

    def __init__(
        self,
        *,
        translate_x: float | None = 0.02,
        translate_y: float | None = 0.02,
        rotation: float | None = 15.0,
        scale: float | None = 0.05,
        stretch: float | None = 0.05,
        shear: float | None = 0.05,
    ) -> None:
        widths = {
            "translate_x": translate_x,
            "translate_y": translate_y,
            "rotation": rotation,
            "scale": scale,
            "stretch": stretch,
            "shear": shear,
        }
        super().__init__(widths)
        units = [UNITS[name] / HALVES[name] for name in self.names]
        self.widths = Learned([widths[name] for name in self.names], positive, unit=units, names=self.names)
        dtype = torch.get_default_dtype()
        for name, values in (("generators", GENERATORS), ("halves", HALVES)):
            values = torch.tensor([values[name] for name in self.names], dtype=dtype)
            self.register_buffer(name, values, persistent=False)

    def half_widths(self, draws: Tensor | None = None) -> Tensor:
        """Return the half-widths, [n], differentiable: in half image widths, radians and log-factors.

        Args:
            draws: [batch, n]; if partnets.stn perturbs each example, the result is [batch, n].
        """
        return self.widths(draws) * self.halves

    def matrices(self, draws: Tensor) -> Tensor:
        """Return matrices for draws in [-1, 1], [batch, n]: t_i is draws_i times the i-th half-width.

        Example:
            >>> quarter_turn = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0, 0.0]])
            >>> augmentation = Affine(rotation=90.0)
            >>> augmentation.transform(torch.arange(4.0).view(1, 1, 2, 2), quarter_turn).detach().round().abs()
            tensor([[[[1., 3.],
                      [0., 2.]]]])
        """
        amounts = draws * self.half_widths(draws)
        return exponential(torch.einsum("bn,nij->bij", amounts, self.generators.to(amounts.dtype)))
