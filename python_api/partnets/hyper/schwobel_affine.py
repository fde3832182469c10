"""SchwobelAffine: random affine transformations of images, with separately learned minima and maxima."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from partnets.hyper.learned import Learned
from partnets.hyper.ranges import real
from partnets.hyper.warp import Warp

# Factors from user units to matrix entries: degrees, fractions of the image's width.
UNITS = {"rotation": math.pi / 180, "translate_x": 2.0, "translate_y": 2.0}
# Values of the identity transformation, if not 0.
IDENTITY = {"scale_x": 1.0, "scale_y": 1.0}

Pair = tuple[float, float]


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

    Shapes:
        x [batch, channels, height, width], floating point; returns the same shape.

    Raises:
        ValueError: a pair is not two finite numbers, the smaller one first, or all are None.

    Example:
        >>> augmentation = SchwobelAffine(rotation=(-10.0, 30.0), translate_x=None, translate_y=None)
        >>> augmentation(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 1, 8, 8])
        >>> values = augmentation.values()
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
        for name in self.names:
            pair = pairs[name]
            if not (isinstance(pair, tuple | list) and len(pair) == 2 and pair[0] <= pair[1]):
                raise ValueError(f"{name}={pair}; pass a pair (minimum, maximum), or None to leave it out.")
        units = [UNITS.get(name, 1.0) for name in self.names]
        self.minima, self.maxima = (
            Learned(
                [pairs[name][side] for name in self.names],
                real,
                unit=units,
                names=[f"{name}_{suffix}" for name in self.names],
            )
            for side, suffix in enumerate(("min", "max"))
        )

    def matrices(self, draws: Tensor) -> Tensor:
        """Return matrices for draws in [-1, 1], [batch, n]: -1 gives the minimum, 1 the maximum.

        Example:
            >>> others = ("scale_x", "scale_y", "shear_x", "shear_y", "translate_x", "translate_y")
            >>> augmentation = SchwobelAffine(rotation=(0.0, 90.0), **dict.fromkeys(others))
            >>> image = torch.arange(4.0).view(1, 1, 2, 2)
            >>> augmentation.transform(image, torch.tensor([[1.0]])).detach().round().abs()
            tensor([[[[1., 3.],
                      [0., 2.]]]])
        """
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
