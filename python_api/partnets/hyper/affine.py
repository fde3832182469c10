"""Affine, ImmerAffine: random affine transformations of images by matrix exponentials, whose widths are learned."""

from __future__ import annotations

import math
from types import MappingProxyType

import torch
from torch import Tensor

from partnets.hyper.learned import Learned
from partnets.hyper.ranges import clamped, positive, real
from partnets.hyper.warp import Warp, exponential

# Benton et al. (2020, Appendix A) have the first six, Immer et al. (2022) scale_x and scale_y for scale and stretch.
# In the coordinates of warp.
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
# A generator's coefficient for one of the user's units: fractions of the image's width, degrees, log-factors.
UNITS = dict.fromkeys(GENERATORS, 1.0) | {"translate_x": 2.0, "translate_y": 2.0, "rotation": math.pi / 180}

REACH = dict.fromkeys(GENERATORS, 0.5) | {"translate_x": 0.25, "translate_y": 0.25, "rotation": 180.0}

# What Augerino's width of 1 is as a half-width, in the coordinates of warp.
HALVES = dict.fromkeys(GENERATORS, 0.5) | {"translate_x": 0.05, "translate_y": 0.05}


class _Exponential(Warp):
    """Each image moves by exp(sum_i t_i G_i), t_i ~ U[-1, 1] times the i-th half-width."""

    # The largest widths that partnets.tune tries.
    reach = MappingProxyType(REACH)

    def __init__(self, widths: dict[str, float | None]) -> None:
        super().__init__(widths)
        generators = torch.tensor([GENERATORS[name] for name in self.names], dtype=torch.get_default_dtype())
        self.register_buffer("generators", generators, persistent=False)

    def matrices(self, draws: Tensor) -> Tensor:
        """For draws in [-1, 1], [batch, n]: t_i is draws_i times the i-th half-width.

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
    """Moves each image by a random affine transformation, drawn anew at each call, in training and inference.

    For each image and generator G_i, t_i ~ U[-w_i / 2, w_i / 2], and the image moves by exp(sum_i t_i G_i) (Benton et
    al. 2020, Augerino). The widths w_i are learned, each as the softplus of an unconstrained parameter; as in their
    code, the generators of translations are scaled by 0.1. Unlike there, the image ends at its edges and not at the
    centres of its outer pixels (align_corners=False), as rotated data sets are made. The partitioned networks' paper
    has this one in its fine-tuning experiments (Table 2, Appendix I.4). Average a network over several draws with
    hyper.Averaged.

    Args:
        translate_x, translate_y: initial half-widths as fractions of the image's width.
        rotation: in degrees.
        scale, stretch, shear: as log-factors: e**scale times larger, e**stretch times wider and as much lower, and the
            same along the diagonals.
        For each: None leaves this transformation out.

    Attributes:
        widths: hyper.Learned, w_i for each transformation that is not left out; values() gives half-widths.

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
        """The half-widths, [n], differentiable: half the image's width is 1; radians; log-factors.

        Args:
            draws: [batch, n], for half-widths [batch, n] where partnets.stn perturbs those of each example.
        """
        return self.widths(draws) * self.halves


class ImmerAffine(_Exponential):
    """As Affine, in the parametrisation of Immer et al. (2022, LILA): half-widths η without a constraint, from 0.

    The partitioned networks' paper has this one on CIFAR-10 (Appendix I.4). For each image and generator,
    t_i ~ U[-1, 1] η_i, and the image moves by exp(sum_i t_i G_i). η may be negative, which means the same as its
    absolute value. The rotation's is clamped to ±180°, beyond which it gets no gradient.

    At η = 0 nothing moves, and as draws are symmetric the gradient there is zero in expectation; that of each draw is
    not, and sets η going.

    Args:
        translate_x, translate_y: initial half-widths as fractions of the image's width.
        rotation: in degrees.
        scale_x, scale_y, shear: as log-factors: e**scale_x times wider, e**scale_y times higher, e**shear times longer
            along one diagonal and as much shorter along the other.
        For each: None leaves this transformation out. Each is a hyper.Learned under its name.

    Shapes:
        x [batch, channels, height, width], floating point, to the same.

    Raises:
        ValueError: a half-width is not finite, that of the rotation is not within ±180, or all are None.

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
        """As of Affine."""
        of = None if draws is None else draws[:, 0]
        return torch.stack([getattr(self, name)(of) for name in self.names], -1)
