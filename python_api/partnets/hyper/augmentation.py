"""Augmentation: a random transformation, drawn separately for each example."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from partnets.hyper.hyperparameter import Hyperparameter
from partnets.hyper.learned import check_real


class Augmentation(Hyperparameter):
    """The base class of random augmentations: Affine and ColourJitter.

    Each call draws n numbers from U[-1, 1] for each example. Subclasses define transform(x, draws).

    Args:
        initial: the initial value of each transformation; None leaves it out.

    Attributes:
        names: names of the n transformations in use.

    Raises:
        ValueError: all initial values are None.

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

    def __init__(self, initial: Mapping[str, float | None]) -> None:
        super().__init__()
        self.names = tuple(name for name, value in initial.items() if value is not None)
        if not self.names:
            raise ValueError(f"{', '.join(initial)} are all None; give at least one of them a value.")

    def forward(self, x: Tensor) -> Tensor:
        check_real(self, x)
        psi = next(self.parameters())
        draws = 2 * torch.rand(x.shape[0], len(self.names), dtype=psi.dtype, device=psi.device) - 1
        # Autocast would round the matrices to 8 bits and so move the images.
        with torch.autocast(x.device.type, enabled=False):
            return self.transform(x, draws)

    def transform(self, x: Tensor, draws: Tensor) -> Tensor:
        """Transform x by given draws in [-1, 1], [batch, n]."""
        raise NotImplementedError(f"{type(self).__name__} has no transform(x, draws); define it.")

    def to_torch(self) -> nn.Module:
        """Return nn.Identity(): a deployed model sees each example unchanged."""
        return nn.Identity()

    def fixed(self, draws: Tensor) -> FixedDraws:
        """Return this augmentation with S fixed draws in [-1, 1], [S, n]."""
        return FixedDraws(self, draws)


class FixedDraws(nn.Module):
    """An augmentation of S * batch copies, made by hyper.Averaged, with the same S draws for each example.

    Args:
        augmentation: a module with transform(x, numbers).
        numbers: [S, ...], the second argument of transform for each draw.
    """

    def __init__(self, augmentation: nn.Module, numbers: Tensor) -> None:
        super().__init__()
        self.augmentation = augmentation
        self.register_buffer("numbers", numbers.contiguous())  # torch.export warns about a view of a larger tensor

    def forward(self, copies: Tensor) -> Tensor:
        examples = copies.shape[0] // self.numbers.shape[0]
        # torch.onnx would fix repeat_interleave to the batch size of the export.
        numbers = self.numbers.unsqueeze(1).expand(-1, examples, *self.numbers.shape[1:]).flatten(0, 1)
        with torch.autocast(copies.device.type, enabled=False):
            return self.augmentation.transform(copies, numbers)
