"""Affine, ImmerAffine: random affine transformations of images by matrix exponentials, with learned widths."""

from __future__ import annotations

import math
from types import MappingProxyType

import torch
from torch import Tensor

from partnets.hyper.learned import Learned
from partnets.hyper.ranges import clamped, positive, real
from partnets.hyper.warp import Warp, exponential

# The first six as in Benton et al. (2020, Appendix A); scale_x and scale_y replace scale and stretch in Immer et al.
# (2022). Coordinates as in warp.
GENERATORS = {
    "translate_x": ((0, 0, 1), (0, 0, 0), (0, 0, 0)),
    "translate_y": ((0, 0, 0), (0, 0, 1), (0, 0, 0)),
    "rotation": ((0, 1, 0), (-1, 0, 0), (0, 0, 0)),
    "scale": ((1, 0, 0), (0, 1, 0), (0, 0, 0)),
    "stretch": ((1, 0, 0), (0, -1, 0), (0, 0, 0)),
    "shear": ((0, 1, 0), (1, 0, 0), (0, 0, 0)),
    "scale_x": ((1, 0, 0), (0, 0, 0), (0, 0, 0)),
    "scale_y": ((0, 0, 0), (0, 1, 0), (0, 0, 0)),
}
# Factors from user units to generator coefficients: fractions of the image's width, degrees, log-factors.
UNITS = dict.fromkeys(GENERATORS, 1.0) | {"translate_x": 2.0, "translate_y": 2.0, "rotation": math.pi / 180}

REACH = dict.fromkeys(GENERATORS, 0.5) | {"translate_x": 0.25, "translate_y": 0.25, "rotation": 180.0}

# Half-widths, in the coordinates of warp, that correspond to Augerino's width of 1.
HALVES = dict.fromkeys(GENERATORS, 0.5) | {"translate_x": 0.05, "translate_y": 0.05}


class _Exponential(Warp):
    """An augmentation that moves each image by exp(sum_i t_i G_i), t_i ~ U[-1, 1] times the i-th half-width."""

    # The largest widths that partnets.tune tries.
    reach = MappingProxyType(REACH)

    def __init__(self, widths: dict[str, float | None]) -> None:
        super().__init__(widths)
        generators = torch.tensor([GENERATORS[name] for name in self.names], dtype=torch.get_default_dtype())
        self.register_buffer("generators", generators, persistent=False)

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


class Affine(_Exponential):
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
        self.widths = Learned(
            [widths[name] for name in self.names],
            positive,
            unit=[UNITS[name] / HALVES[name] for name in self.names],
            names=self.names,
        )
        halves = torch.tensor([HALVES[name] for name in self.names], dtype=torch.get_default_dtype())
        self.register_buffer("halves", halves, persistent=False)

    def half_widths(self, draws: Tensor | None = None) -> Tensor:
        """Return the half-widths, [n], differentiable: in half image widths, radians and log-factors.

        Args:
            draws: [batch, n]; if partnets.stn perturbs each example, the result is [batch, n].
        """
        return self.widths(draws) * self.halves


class ImmerAffine(_Exponential):
    """Affine in the parametrisation of Immer et al. (2022, LILA): unconstrained half-widths η that start at 0.

    The partitioned networks' paper uses it on CIFAR-10 (Appendix I.4). Each image moves by exp(sum_i t_i G_i), with
    t_i ~ U[-1, 1] η_i for each generator. The sign of η has no effect. The rotation's η is clamped to ±180°, beyond
    which it gets no gradient.

    At η = 0 nothing moves. The gradient there is zero in expectation, as draws are symmetric, but not for a single
    draw, so that η leaves 0.

    Args:
        translate_x, translate_y: initial half-widths as fractions of the image's width.
        rotation: initial half-width in degrees.
        scale_x, scale_y, shear: as log-factors: e**scale_x times wider, e**scale_y times higher, e**shear times longer
            along one diagonal and as much shorter along the other.
        For each: None leaves this transformation out. Each is a hyper.Learned under its name.

    Shapes:
        x [batch, channels, height, width], floating point; returns the same shape.

    Raises:
        ValueError: a half-width is not finite, the rotation's exceeds ±180, or all are None.

    Example:
        >>> augmentation = ImmerAffine(rotation=30.0, shear=None)
        >>> augmentation(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 1, 8, 8])
        >>> {name: round(value, 3) for name, value in augmentation.values().items()}
        {'translate_x': 0.0, 'translate_y': 0.0, 'rotation': 30.0, 'scale_x': 0.0, 'scale_y': 0.0}
    """

    def __init__(
        self,
        *,
        translate_x: float | None = 0.0,
        translate_y: float | None = 0.0,
        rotation: float | None = 0.0,
        scale_x: float | None = 0.0,
        scale_y: float | None = 0.0,
        shear: float | None = 0.0,
    ) -> None:
        widths = {
            "translate_x": translate_x,
            "translate_y": translate_y,
            "rotation": rotation,
            "scale_x": scale_x,
            "scale_y": scale_y,
            "shear": shear,
        }
        super().__init__(widths)
        for name in self.names:
            range = clamped(-math.pi, math.pi) if name == "rotation" else real
            range.check(name, widths[name], UNITS[name])
            setattr(self, name, Learned(widths[name], range, unit=UNITS[name]))

    def half_widths(self, draws: Tensor | None = None) -> Tensor:
        """Return the half-widths as Affine does."""
        of = None if draws is None else draws[:, 0]
        return torch.stack([getattr(self, name)(of) for name in self.names], -1)
