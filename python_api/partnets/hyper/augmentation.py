"""Augmentation: a random transformation of each example, by a draw of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partnets.hyper.hyperparameter import Hyperparameter
from partnets.hyper.learned import check_real


class Augmentation(Hyperparameter):
    """Draws n numbers from U[-1, 1] for each example, anew at each call, and transforms it by them.

    The base class of Affine, ImmerAffine, SchwobelAffine and ColourJitter, which define transform(x, draws).

    Args:
        initial: what each transformation starts from; None leaves one out.

    Attributes:
        names: of the n transformations that are not left out.

    Raises:
        ValueError: all are left out.

    Example:
        >>> from partnets import hyper
        >>> class Brighten(Augmentation):
        ...     def __init__(self, brightness):
        ...         super().__init__({"brightness": brightness})
        ...         self.brightness = hyper.Learned(brightness, hyper.positive)
        ...     def transform(self, x, draws):
        ...         return x + self.brightness(x) * draws[:, :, None, None]
        >>> Brighten(0.5)(torch.zeros(2, 3, 8, 8)).shape
        torch.Size([2, 3, 8, 8])
    """

    per_example = True

    def __init__(self, initial: dict[str, object]) -> None:
        super().__init__()
        self.names = tuple(name for name, value in initial.items() if value is not None)
        if not self.names:
            raise ValueError(f"{', '.join(initial)} are all None; give at least one of them a value.")

    def forward(self, x: Tensor) -> Tensor:
        check_real(self, x)
        psi = next(self.parameters())
        draws = 2 * torch.rand(x.shape[0], len(self.names), dtype=psi.dtype, device=psi.device) - 1
        # Under autocast, matrices of a few entries would be rounded to 8 bits, and images moved to wrong places.
        with torch.autocast(x.device.type, enabled=False):
            return self.transform(x, draws)

    def transform(self, x: Tensor, draws: Tensor) -> Tensor:
        """forward with given draws in [-1, 1], [batch, n]."""
        raise NotImplementedError(f"{type(self).__name__} has no transform(x, draws); define it.")

    def to_ordinary(self) -> nn.Module:
        """Nothing: what is deployed sees each example as it is."""
        return nn.Identity()

    def fixed(self, draws: Tensor) -> FixedDraws:
        """This augmentation at S given draws in [-1, 1], [S, n], the same at each call."""
        return FixedDraws(self, draws)


class FixedDraws(nn.Module):
    """An augmentation of S * batch copies, as hyper.Averaged makes them, by the same S draws for each example.

    Args:
        augmentation: with transform(x, numbers).
        numbers: [S, ...], what it gets for each draw.

    Example:
        >>> from partnets import hyper
        >>> fixed = hyper.Affine().fixed(torch.zeros(2, 6))
        >>> x = torch.rand(4, 1, 8, 8)
        >>> torch.allclose(fixed(x), x, atol=1e-6), torch.equal(fixed(x), fixed(x))
        (True, True)
    """

    def __init__(self, augmentation: nn.Module, numbers: Tensor) -> None:
        super().__init__()
        self.augmentation = augmentation
        self.register_buffer("numbers", numbers.contiguous())  # torch.export warns of a part of a larger tensor

    def forward(self, copies: Tensor) -> Tensor:
        examples = copies.shape[0] // self.numbers.shape[0]
        # Not repeat_interleave, which torch.onnx fixes to the batch size that it was shown.
        numbers = self.numbers.unsqueeze(1).expand(-1, examples, *self.numbers.shape[1:]).flatten(0, 1)
        with torch.autocast(copies.device.type, enabled=False):
            return self.augmentation.transform(copies, numbers)
