"""Data: a data set in memory, with random subsets and a rotated version."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

import torch
from torch import Generator, Tensor

from partkernels.arguments import check_seed
from partnets.data import folders
from partnets.data.examples import as_tensor
from partnets.hyper.affine import GENERATORS, warp

# Images converted to floats at once: about 50 MB for 3x64x64.
BATCH = 1000


@dataclass(frozen=True, eq=False, repr=False)
class Data:
    """A training and a test set, as (x, y) tensors on the CPU.

    x is uint8 if the files hold bytes, which takes a quarter of the memory of float32 (Tiny ImageNet: 1.4 GB), and
    float32 in [0, 1] otherwise. data.ToFloat converts batches to floats in the model.

    Attributes:
        name: name of the data set.
        train, test: (x, y): images [n, channels, height, width] or features [n, features], and labels, int64 [n],
            in 0..classes-1.
        classes: the number of classes.
        mean, std: of each channel or feature over the training set, for images in units of [0, 1]. Subsets and
            rotated versions keep the values of the full, upright set.
        angles: the rotation of each training image in radians, or None without rotation.
        names: the names of the classes in the order of their labels, or empty.

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
    names: tuple[str, ...] = ()

    @classmethod
    def from_folder(
        cls, root: str | PathLike, size: int | tuple[int, int] | None = None, *, test: float = 0.2, seed: int = 0
    ) -> Data:
        """Read images from a folder with one subfolder for each class. Needs torchvision.

        Classes are numbered in the order of their names, as in torchvision's ImageFolder, and images are turned upright
        by their EXIF orientation. All are kept in memory.

        Args:
            root: has a folder for each class, or train and test (or val, valid, validation) with such folders. If it
                has both test and val, the images of val join the training set, as no validation set is needed.
            size: height and width, or one number for both, to which images are scaled and centre-cropped; None if all
                have the same size.
            test: the share of each class that becomes the test set, if the folder has no test part.
            seed: an int in [0, 2**63), seed of that split.

        Returns:
            Images uint8 [n, 3, height, width], or [n, 1, height, width] if all files are grey.

        Raises:
            ImportError: torchvision is not installed.
            FileNotFoundError: there is no such folder, or a class has no image.
            ValueError: a file is damaged, has more than 8 bits a channel or is linked twice; sizes differ and size is
                None; a class is only in the test part; root has parts of other names.

        Example:
            >>> import pathlib, tempfile
            >>> from PIL import Image
            >>> with tempfile.TemporaryDirectory() as root:
            ...     for path in (pathlib.Path(root, kind, f"{i}.png") for kind in ("cat", "dog") for i in range(5)):
            ...         path.parent.mkdir(exist_ok=True)
            ...         Image.new("RGB", (12, 8)).save(path)
            ...     data = Data.from_folder(root, size=8)
            >>> data.train[0].shape, len(data.test[0]), data.names
            (torch.Size([8, 3, 8, 8]), 2, ('cat', 'dog'))
        """
        check_seed("seed", seed)
        if not isinstance(root, str | PathLike):
            raise TypeError(f"root is of type {type(root).__name__}; pass the path of a folder.")
        files = folders.find(Path(root), test, seed)
        train, tested = folders.decode([files.train, files.test], size)
        name = Path(root).resolve().name
        return cls(name, train, tested, len(files.classes), *moments(train[0]), names=tuple(files.classes))

    @classmethod
    def from_arrays(cls, train: Sequence, test: Sequence | float = 0.2, *, name: str = "arrays", seed: int = 0) -> Data:
        """Return Data from images or features and labels in NumPy arrays, tensors or lists.

        Args:
            train: (x, y): images [n, channels, height, width] or [n, height, width], uint8 in 0..255 or floats in
                [0, 1], or features [n, features]; and labels [n], integers from 0.
            test: (x, y) likewise, or the share of each class that is split off at random.
            name: name of the data set.
            seed: an int in [0, 2**63), seed of that split.

        Raises:
            TypeError: labels are not integers; for a regression pass (x, y) to partnets.chunk or tune.
            ValueError: shapes do not match; x has NaN, infinite or masked numbers, or bytes as floats; or a label is
                negative or not below the number of examples.

        Example:
            >>> Data.from_arrays((torch.rand(10, 8, 8), [0, 1] * 5))
            Data(arrays: 8 examples to train and 2 to test, [1, 8, 8] of float32, 2 classes)
        """
        check_seed("seed", seed)
        x, y = _pair("train", train)
        if not isinstance(test, tuple | list):
            parts = folders.share_off(y, test, seed)
            pairs = (x[parts == 0], y[parts == 0]), (x[parts == 1], y[parts == 1])
        else:
            pairs = (x, y), _pair("test", test)
        if not len(pairs[0][0]) or not len(pairs[1][0]) or pairs[0][0].shape[1:] != pairs[1][0].shape[1:]:
            shapes = " and ".join(str(list(x.shape)) for x, _ in pairs)
            raise ValueError(f"x to train and to test are {shapes}; pass examples of one shape for both.")
        largest = int(max(y.max() for _, y in pairs))
        if largest >= len(pairs[0][1]) + len(pairs[1][1]):
            raise ValueError(
                f"there is a label {largest} of {len(pairs[0][1]) + len(pairs[1][1])} examples; pass labels from 0,"
                " such as numpy.unique(y, return_inverse=True)[1]."
            )
        return cls(name, *pairs, 1 + largest, *moments(pairs[0][0]))

    def subset(self, n: int, seed: int = 0) -> Data:
        """Return n random training examples and all test examples; with one seed, smaller subsets are in larger ones.

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
        """Rotate each training and test image once, by a separate angle from U[-π, π] (Appendix I.5).

        This turns MNIST into RotMNIST. Interpolation is bilinear, with black outside. x keeps its dtype, so bytes are
        rounded. The angles of test images do not depend on the training set. Rotate before taking subsets, so that an
        image has the same angle in all of them.

        Args:
            seed: an int in [0, 2**63), seed of the angles.

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


def _pair(what: str, pair: Sequence) -> tuple[Tensor, Tensor]:
    """Return x, in float32 or uint8, and labels in int64."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(f"{what} is a {type(pair).__name__}; pass (x, y), images or features and labels.")
    x, y = (as_tensor(part).cpu() for part in pair)
    x = x[:, None] if x.dim() == 3 else x
    if x.dim() == 4 and x.dtype != torch.uint8 and not x.is_floating_point():
        kind = str(x.dtype).removeprefix("torch.")
        raise TypeError(f"{what} has images of {kind}; pass uint8 in 0..255, or floats in [0, 1].")
    x = x if x.dtype == torch.uint8 else x.float()
    if y.is_floating_point():
        raise TypeError(f"{what} has labels of {str(y.dtype).removeprefix('torch.')}; pass whole numbers from 0.")
    if x.dim() not in (2, 4) or y.shape != x.shape[:1] or not len(x):
        raise ValueError(
            f"{what} has x of shape {list(x.shape)} and y of {list(y.shape)}; pass images [n, channels, height, width]"
            " or [n, height, width], or features [n, features], and labels [n]."
        )
    if x.dim() == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        raise ValueError(f"{what} has images {list(x.shape)}, with channels last; pass x.transpose(0, 3, 1, 2).")
    if x.dim() == 4 and x.is_floating_point() and x.max() > 2 and bool((x == x.round()).all()) and x.min() >= 0:
        raise ValueError(
            f"{what} has images of whole numbers to {x.max():.0f}, in floats; pass x.astype(numpy.uint8), which are"
            " scaled to [0, 1], or x / 255."
        )
    if not bool(x.isfinite().all()) or int(y.min()) < 0:
        raise ValueError(f"{what} has {'a negative label' if int(y.min()) < 0 else 'NaN or infinite numbers'}.")
    return x, y.long()


def moments(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each channel, over all examples and pixels.

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
