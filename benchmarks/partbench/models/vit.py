"""ViT: a transformer over image patches."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from partbench.models.transformer import Block
from partkernels import Normal


class ViT(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2021), with ViT-Tiny's width and depth by default; returns logits.

    It has 5 362 378 parameters by default.

    Args:
        image_size: height and width.
        patch: height and width of a patch, a divisor of image_size.
        width: features of each patch.
        depth: number of blocks.
        heads: a divisor of width.
        classes: number of logits.

    Shapes:
        x [batch, 3, image_size, image_size]; returns [batch, classes].

    Raises:
        ValueError: the images have another size.

    Example:
        >>> ViT(width=32, depth=2, heads=2)(torch.zeros(3, 3, 32, 32)).shape
        torch.Size([3, 10])
    """

    def __init__(
        self,
        image_size: int = 32,
        patch: int = 4,
        width: int = 192,
        depth: int = 12,
        heads: int = 3,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.image_size = image_size
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Embedding((image_size // patch) ** 2, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.positions.seed_defaults = functools.partial(Normal, 0.02)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2:] != (self.image_size, self.image_size):
            raise ValueError(
                f"the images have shape {tuple(x.shape)}; pass [batch, channels, {self.image_size}, {self.image_size}],"
                " or make the model with their image_size."
            )
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = self.blocks(x + self.positions(torch.arange(x.shape[1], device=x.device)))
        # The mean instead of a class token is as accurate (Beyer et al. 2022), and the number of tokens remains a power
        # of two.
        return self.head(self.norm(x).mean(1))
