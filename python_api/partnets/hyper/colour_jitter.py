"""ColourJitter: random colour changes of images, with learned widths."""

from __future__ import annotations

import math
from types import MappingProxyType

import torch
from torch import Tensor

from partnets.hyper.augmentation import Augmentation
from partnets.hyper.learned import Learned
from partnets.hyper.ranges import positive

# Rows: grey (Y) and the two coordinates of the chroma plane (I, Q), from red, green and blue.
YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))
UNITS = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": math.pi / 180}


class ColourJitter(Augmentation):
    """A layer that changes the colours of each image by a random linear map, in training and inference.

    Each call draws, for each image and change, t ~ U[-w, w] with a learned half-width w. Brightness is multiplied by
    e**t; so are distances from the image's mean grey (contrast) and from each pixel's grey (saturation). Hue turns by t
    degrees in the chroma plane of YIQ (positive: from red towards green). The four changes commute and are
    differentiable. Black is 0. Results are not clipped and may leave [0, 1]; standardise afterwards.

    Args:
        brightness, contrast, saturation: initial half-widths, as log-factors; None leaves the change out.
        hue: initial half-width in degrees; None leaves the change out.

    Attributes:
        widths: hyper.Learned, one value for each change in use.

    Shapes:
        x [batch, 3, height, width], red, green and blue, floating point; returns the same shape. Without saturation and
        hue also [batch, 1, height, width].

    Raises:
        ValueError: a half-width is not positive, all are None; or, in forward, x has another number of channels.

    Example:
        >>> jitter = ColourJitter(brightness=0.2, hue=None)
        >>> jitter(torch.rand(2, 3, 8, 8)).shape
        torch.Size([2, 3, 8, 8])
        >>> {name: round(value, 3) for name, value in jitter.values().items()}
        {'brightness': 0.2, 'contrast': 0.1, 'saturation': 0.1}
    """

    # The largest half-widths that partnets.tune tries.
    reach = MappingProxyType({"brightness": 0.7, "contrast": 0.7, "saturation": 1.0, "hue": 60.0})

    def __init__(
        self,
        *,
        brightness: float | None = 0.1,
        contrast: float | None = 0.1,
        saturation: float | None = 0.1,
        hue: float | None = 10.0,
    ) -> None:
        widths = {"brightness": brightness, "contrast": contrast, "saturation": saturation, "hue": hue}
        super().__init__(widths)
        units = [UNITS[name] for name in self.names]
        self.widths = Learned([widths[name] for name in self.names], positive, unit=units, names=self.names)
        yiq = torch.tensor(YIQ, dtype=torch.float64)
        quarter_turn = torch.tensor([[0, 0, 0], [0, 0, 1], [0, -1, 0]], dtype=torch.float64)
        grey = yiq[:1].expand(3, 3)
        # The grey part of a colour, the chroma part, and the chroma part turned by 90 degrees.
        parts = torch.stack((grey, torch.eye(3) - grey, yiq.inverse() @ quarter_turn @ yiq))
        self.register_buffer("parts", parts.to(torch.get_default_dtype()), persistent=False)

    def transform(self, x: Tensor, draws: Tensor) -> Tensor:
        """Transform x by given draws in [-1, 1], [batch, n]; t is draws times the half-widths.

        Example:
            >>> jitter = ColourJitter(brightness=math.log(2), contrast=None, saturation=None, hue=None)
            >>> jitter.transform(torch.full((1, 3, 1, 1), 0.25), torch.ones(1, 1)).flatten()
            tensor([0.5000, 0.5000, 0.5000], grad_fn=<ViewBackward0>)
        """
        if x.shape[1] == 1 and not {"saturation", "hue"}.isdisjoint(self.names):
            raise ValueError(
                "the images have 1 channel, but saturation and hue need 3; construct"
                " ColourJitter(saturation=None, hue=None)."
            )
        if x.shape[1] not in (1, 3):
            raise ValueError(f"the images have {x.shape[1]} channels; pass 3 (red, green and blue), or 1 (grey).")
        amounts = draws * self.widths(draws)
        amount = dict.fromkeys(UNITS, amounts.new_zeros(x.shape[0]))
        amount |= zip(self.names, amounts.unbind(1), strict=True)
        brightness, contrast, saturation = (amount[name].exp() for name in ("brightness", "contrast", "saturation"))
        if x.shape[1] == 3:
            chroma = torch.stack((saturation * amount["hue"].cos(), saturation * amount["hue"].sin()), 1)
            parts = self.parts.to(chroma.dtype)
            matrix = parts[0] + torch.einsum("bk,kij->bij", chroma, parts[1:])
            grey = parts[0, 0]
        else:
            matrix = grey = amounts.new_ones(1)
        matrix = (brightness * contrast)[:, None, None] * matrix
        offset = (brightness * (1 - contrast)).to(x.dtype) * (x.mean((2, 3)) @ grey.to(x.dtype))
        return torch.einsum("bij,bjhw->bihw", matrix.to(x.dtype), x) + offset[:, None, None, None]
