"""ImmerAffine and SchwobelAffine: the parametrisations of affine augmentations in the paper's experiments."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.transforms import Transform

from partnets import hyper
from partnets.hyper.affine import GENERATORS, UNITS, Warp, exponential

# Immer et al. (2022) replace scale and stretch by scales of each axis.
IMMER_GENERATORS = {
    **{name: GENERATORS[name] for name in ("translate_x", "translate_y", "rotation")},
    "scale_x": ((1, 0, 0), (0, 0, 0), (0, 0, 0)),
    "scale_y": ((0, 0, 0), (0, 1, 0), (0, 0, 0)),
    "shear": GENERATORS["shear"],
}
# Factors from user units to matrix entries: degrees, fractions of the image's width.
SCHWOBEL_UNITS = {name: UNITS[name] for name in ("rotation", "translate_x", "translate_y")}
# Values of the identity transformation, if not 0.
IDENTITY = {"scale_x": 1.0, "scale_y": 1.0}

Pair = tuple[float, float]


class _Clamp(Transform):
    """The identity inside of an interval; beyond a border the gradient is 0."""

    domain = codomain = constraints.real

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self.low, self.high = low, high

    def _call(self, x: Tensor) -> Tensor:
        return x.clamp(self.low, self.high)

    def _inverse(self, y: Tensor) -> Tensor:
        return y


HALF_TURN = hyper.Range(-math.pi, math.pi, _Clamp(-math.pi, math.pi))


class ImmerAffine(Warp):
    """hyper.Affine in the parametrisation of Immer et al. (2022, LILA): unconstrained half-widths η that start at 0.

    The partitioned networks' paper uses it on CIFAR-10 (Appendix I.4). Each transformation i has a generator, the
    matrix G_i. An image moves by exp(sum_i t_i G_i), with a draw of each t_i from η_i U[-1, 1]. The sign of η has no
    effect. The rotation's η is clamped to ±180°, and gets no gradient beyond.

    At η = 0, images do not move. As draws are symmetric, the expected gradient is 0 there. The gradient of a single
    draw is not, so η leaves 0.

    Args:
        translate_x, translate_y: initial half-widths as fractions of the image's width.
        rotation: initial half-width in degrees.
        scale_x, scale_y, shear: as log-factors: e**scale_x times wider, e**scale_y times higher, e**shear times longer
            along one diagonal and as much shorter along the other.
        For each: None leaves this transformation out. Each is a hyper.Learned under its name.

    Example:
        >>> augmentation = ImmerAffine(rotation=30.0, shear=None)
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
        generators = [IMMER_GENERATORS[name] for name in self.names]
        self.register_buffer("generators", torch.tensor(generators, dtype=torch.get_default_dtype()), persistent=False)
        for name in self.names:
            range = HALF_TURN if name == "rotation" else hyper.real
            setattr(self, name, hyper.Learned(widths[name], range, unit=UNITS.get(name, 1.0)))

    def matrices(self, draws: Tensor) -> Tensor:
        of = draws[:, 0]
        amounts = draws * torch.stack([getattr(self, name)(of) for name in self.names], -1)
        return exponential(torch.einsum("bn,nij->bij", amounts, self.generators.to(amounts.dtype)))


class SchwobelAffine(Warp):
    """A random affine transformation of each image, with separately learned minima and maxima.

    This is the parametrisation of Schwöbel et al. (2021, last-layer marginal likelihood), used by the partitioned
    networks' paper on MNIST (Appendix I.4). Each call draws seven numbers for each image, uniformly between their
    minimum and maximum, in training and inference. A pixel at q takes the image's value at R H_y H_x S (q - p), with
    rotation R, shears H along y and x, scales S and translation p. Minima and maxima are unconstrained; the numbers
    remain uniform between them if they cross.

    Args:
        rotation: initial (minimum, maximum) in degrees, anticlockwise.
        scale_x, scale_y: factors of the sampling distances: 2 makes the content half as wide or high.
        shear_x, shear_y: slopes: sampling positions move right by shear_x * y, and down by shear_y * x.
        translate_x, translate_y: motion of the content to the right and down, as fractions of the image's width.
        For each: None leaves this transformation out.

    Attributes:
        minima, maxima: hyper.Learned, one value for each transformation in use.

    Example:
        >>> values = SchwobelAffine(rotation=(-10.0, 30.0), translate_x=None, translate_y=None).values()
        >>> round(values["rotation_min"], 3), round(values["rotation_max"], 3)
        (-10.0, 30.0)
    """

    def __init__(
        self,
        *,
        rotation: Pair | None = (-15.0, 15.0),
        scale_x: Pair | None = (0.95, 1.05),
        scale_y: Pair | None = (0.95, 1.05),
        shear_x: Pair | None = (-0.05, 0.05),
        shear_y: Pair | None = (-0.05, 0.05),
        translate_x: Pair | None = (-0.02, 0.02),
        translate_y: Pair | None = (-0.02, 0.02),
    ) -> None:
        pairs = {
            "rotation": rotation,
            "scale_x": scale_x,
            "scale_y": scale_y,
            "shear_x": shear_x,
            "shear_y": shear_y,
            "translate_x": translate_x,
            "translate_y": translate_y,
        }
        super().__init__(pairs)
        units = [SCHWOBEL_UNITS.get(name, 1.0) for name in self.names]
        self.minima, self.maxima = (
            hyper.Learned(
                [pairs[name][side] for name in self.names],
                hyper.real,
                unit=units,
                names=[f"{name}_{suffix}" for name in self.names],
            )
            for side, suffix in enumerate(("min", "max"))
        )

    def matrices(self, draws: Tensor) -> Tensor:
        minima, maxima = self.minima(draws), self.maxima(draws)
        numbers = torch.lerp(minima, maxima, (draws + 1) / 2)
        zero = numbers.new_zeros(numbers.shape[0])
        number = dict(zip(self.names, numbers.unbind(1), strict=True))

        def get(name: str) -> Tensor:
            return number.get(name, zero + IDENTITY.get(name, 0.0))

        one = zero + 1
        cos, sin = get("rotation").cos(), get("rotation").sin()
        rotation = _matrix((cos, -sin), (sin, cos))
        shears = _matrix((one, zero), (get("shear_y"), one)) @ _matrix((one, get("shear_x")), (zero, one))
        scales = _matrix((get("scale_x"), zero), (zero, get("scale_y")))
        linear = rotation @ shears @ scales
        translation = torch.stack((get("translate_x"), get("translate_y")), 1)[..., None]
        return torch.cat((linear, -linear @ translation), 2)


def _matrix(*rows: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([torch.stack(row, -1) for row in rows], -2)
