"""Affine: random affine transformations of images, whose widths are learned."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partnets.hyper.hyperparameter import Hyperparameter

# Augerino's six generators (Benton et al. 2020, Appendix A), in coordinates with x to the right and y downwards whose
# unit is half the image's width, for both axes. So a rotation is one in pixel space, whatever the image's shape.
GENERATORS = {
    "translate_x": ((0, 0, 1), (0, 0, 0), (0, 0, 0)),
    "translate_y": ((0, 0, 0), (0, 0, 1), (0, 0, 0)),
    "rotation": ((0, 1, 0), (-1, 0, 0), (0, 0, 0)),
    "scale": ((1, 0, 0), (0, 1, 0), (0, 0, 0)),
    "stretch": ((1, 0, 0), (0, -1, 0), (0, 0, 0)),
    "shear": ((0, 1, 0), (1, 0, 0), (0, 0, 0)),
}
# A generator's coefficient for one of the user's units: degrees, fractions of the image's width, log-factors.
UNITS = {"translate_x": 2.0, "translate_y": 2.0, "rotation": math.pi / 180, "scale": 1.0, "stretch": 1.0, "shear": 1.0}


def warp(x: Tensor, exponent: Tensor) -> Tensor:
    """Moves the content of images by exp(exponent): bilinear, with zeros outside, align_corners=False.

    Args:
        x: [batch, channels, height, width].
        exponent: [batch, 3, 3], a combination of GENERATORS.

    Returns:
        Like x.

    Example:
        >>> half_turn = math.pi * torch.tensor([GENERATORS["rotation"]])
        >>> warp(torch.arange(4.0).view(1, 1, 2, 2), half_turn).round().abs()
        tensor([[[[3., 2.],
                  [1., 0.]]]])
    """
    height, width = x.shape[-2:]
    # An output pixel takes its value from where the inverse transformation, exp(-exponent), sends it.
    inverse = torch.linalg.matrix_exp(-exponent)[:, :2]
    aspect = height / width
    to_normalised = inverse.new_tensor([[1.0, aspect, 1.0], [1 / aspect, 1.0, 1 / aspect]])
    grid = F.affine_grid((inverse * to_normalised).to(x.dtype), x.shape, align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


class Affine(Hyperparameter):
    """Moves each image by a random affine transformation, drawn anew at each call, in training and inference.

    For each image and generator G_i, t_i ~ U[-w_i, w_i], and the image moves by exp(sum_i t_i G_i) (Benton et al.
    2020).
    The half-widths w_i are learned, each as the softplus of an unconstrained parameter. Average a network over several
    draws with hyper.Averaged.

    Args:
        translate_x, translate_y: initial half-widths as fractions of the image's width.
        rotation: in degrees.
        scale, stretch, shear: as log-factors: e**scale times larger, e**stretch times wider and as much lower, and the
            same along the diagonals.
        For each: None leaves this transformation out.

    Attributes:
        raw: [n] the unconstrained parameter, one for each transformation that is not left out.

    Shapes:
        x [batch, channels, height, width], floating point, to the same.

    Raises:
        ValueError: a half-width is not positive, or all are None.

    Example:
        >>> augmentation = Affine(rotation=30.0, shear=None)
        >>> augmentation(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 1, 8, 8])
        >>> round(augmentation.values()["rotation"], 3)
        30.0
    """

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
        super().__init__()
        widths = {
            "translate_x": translate_x,
            "translate_y": translate_y,
            "rotation": rotation,
            "scale": scale,
            "stretch": stretch,
            "shear": shear,
        }
        widths = {name: width for name, width in widths.items() if width is not None}
        if not widths:
            raise ValueError("every half-width is None; give at least one transformation a positive half-width.")
        for name, width in widths.items():
            if not 0 < width < math.inf:
                raise ValueError(f"{name}={width}; pass a positive half-width, or None to leave it out.")
        self.names = tuple(widths)
        self.raw = nn.Parameter(_inverse_softplus(torch.tensor([w * UNITS[name] for name, w in widths.items()])))
        generators = torch.tensor([GENERATORS[name] for name in widths], dtype=self.raw.dtype)
        self.register_buffer("generators", generators, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        draws = 2 * torch.rand(len(x), len(self.names), dtype=self.raw.dtype, device=self.raw.device) - 1
        return self.transform(x, draws)

    def transform(self, x: Tensor, draws: Tensor) -> Tensor:
        """forward with given draws in [-1, 1], [batch, n]: t_i = draws_i w_i.

        Example:
            >>> augmentation = Affine(rotation=90.0)
            >>> quarter_turn = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0, 0.0]])
            >>> augmentation.transform(torch.arange(4.0).view(1, 1, 2, 2), quarter_turn).detach().round().abs()
            tensor([[[[1., 3.],
                      [0., 2.]]]])
        """
        return warp(x, torch.einsum("bn,nij->bij", draws * F.softplus(self.raw), self.generators))

    def values(self) -> dict[str, float]:
        """The half-widths, in the units of the constructor."""
        widths = F.softplus(self.raw.detach()).tolist()
        return {name: width / UNITS[name] for name, width in zip(self.names, widths, strict=True)}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value:.3g}" for name, value in self.values().items())


def _inverse_softplus(width: Tensor) -> Tensor:
    return width + torch.log(-torch.expm1(-width))
