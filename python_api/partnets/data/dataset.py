"""Data: a data set in memory, its random subsets and its rotated version."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from partkernels.arguments import check_seed
from partnets.hyper.affine import GENERATORS
from partnets.hyper.warp import warp

# Images converted to floats at once: some 50 MB for 3x64x64.
BATCH = 1000


@dataclass(frozen=True, eq=False, repr=False)
class Data:
    """A data set to train and to test, as (x, y) tensors on the CPU.

    x is uint8 where the files hold bytes, a quarter of the memory of float32 (Tiny ImageNet: 1.4 GB), and float32 in
    [0, 1] otherwise. Batches become floats in the model, by data.ToFloat.

    Attributes:
        name: of the data set.
        train, test: (x, y): images [n, channels, height, width] or features [n, features], and labels, int64 [n],
            in 0..classes-1.
        classes: the number of classes.
        mean, std: of each channel or feature over the training set, for images in units of [0, 1]. Subsets and
            rotated versions keep those of the whole, upright set.
        angles: by which each training image was rotated, in radians; None if none was.

    Example:
        >>> images, labels = torch.zeros(6, 1, 4, 4, dtype=torch.uint8), torch.arange(6) % 2
        >>> data = Data("stripes", (images, labels), (images[:2], labels[:2]), 2, *moments(images))
        >>> data.subset(4).rotated()
        Data(rotated-stripes: 4 examples to train and 2 to test, [1, 4, 4] of uint8, 2 classes)
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    angles: Tensor | None = None

    def subset(self, n: int, seed: int = 0) -> Data:
        """n training examples at random, and all test examples; with the same seed, smaller subsets lie in larger ones.

        Args:
            n: 1 to the number of training examples.
            seed: an int in [0, 2**63).

        Raises:
            ValueError: n or seed is out of range.

        Example:
            >>> x, y = torch.rand(10, 2), torch.arange(10)
            >>> data = Data("ten", (x, y), (x, y), 10, *moments(x))
            >>> set(data.subset(3).train[1].tolist()) < set(data.subset(5).train[1].tolist())
            True
        """
        check_seed("seed", seed)
        x, y = self.train
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= len(x):
            raise ValueError(f"n={n!r}, but {self.name} has {len(x)} training examples; pass an int in 1..{len(x)}.")
        chosen = torch.randperm(len(x), generator=Generator().manual_seed(seed), device="cpu")[:n]
        angles = None if self.angles is None else self.angles[chosen]
        return replace(self, train=(x[chosen], y[chosen]), angles=angles)

    def rotated(self, seed: int = 0) -> Data:
        """Each image, to train and to test, rotated once by an angle of its own from U[-π, π] (Appendix I.5).

        So MNIST becomes RotMNIST. Bilinear, with black outside; x keeps its dtype, so bytes are rounded. The angles of
        test images do not depend on the training set. Rotate before taking subsets, so that an image is rotated alike
        in all of them.

        Args:
            seed: an int in [0, 2**63), of the angles.

        Raises:
            ValueError: x are not images, or seed is out of range.

        Example:
            >>> images, labels = torch.full((2, 1, 8, 8), 255, dtype=torch.uint8), torch.arange(2)
            >>> data = Data("white", (images, labels), (images, labels), 2, *moments(images))
            >>> x, _ = data.rotated().train
            >>> x[:, 0, 4, 4].tolist(), (x[:, 0, 0, 0] < 255).tolist()  # the middle stays, the corners turn black
            ([255, 255], [True, True])
        """
        check_seed("seed", seed)
        (train, train_labels), (test, test_labels) = self.train, self.test
        if train.dim() != 4:
            raise ValueError(
                f"{self.name} has x of shape {list(train.shape)}; only images [n, channels, height, width] rotate."
            )
        generator = Generator().manual_seed(seed)
        test_angles, angles = (_angles(len(images), generator) for images in (test, train))
        test, train = _rotate(test, test_angles), _rotate(train, angles)
        name = f"rotated-{self.name}"
        return replace(self, name=name, train=(train, train_labels), test=(test, test_labels), angles=angles)

    def __repr__(self) -> str:
        x = self.train[0]
        return (
            f"Data({self.name}: {len(x)} examples to train and {len(self.test[0])} to test, {list(x.shape[1:])} of"
            f" {str(x.dtype).removeprefix('torch.')}, {self.classes} classes)"
        )


def moments(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and the standard deviation of each channel, over all examples and pixels.

    Args:
        x: [n, channels, ...], float, or uint8 in units of 1/255; n at least 1.

    Example:
        >>> moments(torch.tensor([[[[0, 255]]]], dtype=torch.uint8))
        ((0.5,), (0.5,))
    """
    total = squares = 0.0
    for batch in x.split(BATCH):
        values = batch.transpose(0, 1).flatten(1).double()
        total = total + values.sum(1)
        squares = squares + values.square().sum(1)
    count = x.numel() // x.shape[1]
    mean = total / count
    std = (squares / count - mean.square()).clamp(min=0).sqrt()
    unit = 1 if x.is_floating_point() else 255
    return tuple((mean / unit).tolist()), tuple((std / unit).tolist())


def _angles(count: int, generator: Generator) -> Tensor:
    return math.pi * (2 * torch.rand(count, generator=generator, device="cpu") - 1)


def _rotate(images: Tensor, angles: Tensor) -> Tensor:
    exponents = angles[:, None, None] * angles.new_tensor(GENERATORS["rotation"])
    result = torch.empty_like(images)
    for i in range(0, len(images), BATCH):
        batch = slice(i, i + BATCH)
        moved = warp(images[batch].float(), exponents[batch])
        result[batch] = moved if images.is_floating_point() else moved.round()
    return result
