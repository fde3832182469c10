"""Data: a data set in memory, from arrays, folders of images or scikit-learn, and its rotated version."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from partkernels.arguments import check_seed
from partnets.data.examples import as_tensor
from partnets.data.splitting import stratified
from partnets.hyper.affine import GENERATORS, warp
from partnets.utils.checks import check_at_least

# The number of scikit-learn's digits.
EXAMPLES = 1797
# Images converted to floats at once: about 50 MB for 3x64x64.
BATCH = 1000
# How far floats may leave [0, 1].
ROUNDING = 1e-3


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
        mean, std: of each channel or feature over the training set, for images in units of [0, 1]. A rotated version
            keeps those of the upright set.
        angles: the rotation of each training image in radians, or None without rotation.

    Example:
        >>> images, labels = torch.zeros(6, 1, 4, 4, dtype=torch.uint8), torch.arange(6) % 2
        >>> data = Data("stripes", (images, labels), (images[:2], labels[:2]), 2, *moments(images))
        >>> data.rotated()
        Data(rotated-stripes: 6 examples to train and 2 to test, [1, 4, 4] of uint8, 2 classes)
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    angles: Tensor | None = None

    @classmethod
    def from_arrays(
        cls, train: Sequence[Any], test: Sequence[Any] | float = 0.2, *, name: str = "arrays", seed: int = 0
    ) -> Data:
        """Return Data from copies of images or features and labels in NumPy arrays, tensors or lists.

        Args:
            train: (x, y): images [n, channels, height, width] or [n, height, width], uint8 in 0..255 or floats in
                [0, 1], or features [n, features]; and labels [n], 0 to classes-1, each at least once.
            test: (x, y) likewise, or the share of each class that is split off at random.
            name: name of the data set.
            seed: an int in [0, 2**63), seed of that split.

        Raises:
            TypeError: labels are not integers; for a regression pass (x, y) to partnets.chunk or tune.
            ValueError: shapes do not match; x has NaN, infinite or masked numbers, or images outside [0, 1]; or the
                training labels have gaps, or lack a label of test.

        Example:
            >>> Data.from_arrays((torch.rand(10, 8, 8), [0, 1] * 5))
            Data(arrays: 8 examples to train and 2 to test, [1, 8, 8] of float32, 2 classes)
        """
        check_seed("seed", seed)
        x, y = _pair("train", train)
        is_pair = isinstance(test, tuple | list)
        (x, y), (test_x, test_y) = ((x, y), _pair("test", test)) if is_pair else _split(x, y, test, seed)
        if x.dtype != test_x.dtype:
            kinds = " and ".join(str(one.dtype).removeprefix("torch.") for one in (x, test_x))
            raise TypeError(
                f"x to train and to test are {kinds}, which are scaled differently; pass one dtype for both."
            )
        if x.shape[1:] != test_x.shape[1:]:
            shapes = f"{list(x.shape)} and {list(test_x.shape)}"
            raise ValueError(f"x to train and to test are {shapes}; pass examples of one shape for both.")
        return cls._of(name, (x, y), (test_x, test_y))

    @classmethod
    def from_folder(
        cls,
        root: str | PathLike[str],
        size: int | tuple[int, int],
        *,
        test: float | str | PathLike[str] = 0.2,
        seed: int = 0,
    ) -> Data:
        """Return Data from a folder with a subfolder of images for each class, read by torchvision's ImageFolder.

        Images become RGB without transparency, uint8 [3, height, width], scaled and cropped in the middle. Label i is
        the i-th subfolder in the order of names. Files and folders whose names begin with a dot are ignored, and files
        that are not .jpg, .jpeg, .png, .ppm, .bmp, .pgm, .tif, .tiff or .webp.

        Args:
            root: this folder; or one with two such folders, train and test, and no other.
            size: the height and width of all images in pixels; an int for both.
            test: the test set's folder of this kind, or the share of each class that is split off at random. Unused if
                root has train and test.
            seed: an int in [0, 2**63), seed of that split.

        Raises:
            ImportError: torchvision is not installed.
            FileNotFoundError: the folder is missing, or has no subfolders, or one without images.
            OSError: an image is damaged or too large.
            ValueError: there are training and other folders with the same classes, such as train and val; train and
                test are one folder or have other classes, or there is one class; or an image has more than 8 bits a
                channel.

        Example:
            >>> data = Data.from_folder("flowers", size=64)  # doctest: +SKIP
            >>> data = Data.from_folder("bees/train", size=64, test="bees/val")  # doctest: +SKIP
        """
        check_seed("seed", seed)
        height, width = size if isinstance(size, tuple) and len(size) == 2 else (size, size)
        check_at_least(1, height=height, width=width)
        root = Path(root).expanduser()
        folders = [root, Path(test).expanduser()] if isinstance(test, str | PathLike) else _parts(root)
        if len(folders) == 1:
            _check_share(test)
        parts = [_images(folder, height, width) for folder in folders]
        if len(folders) == 2 and folders[0].resolve() == folders[1].resolve():
            raise ValueError(f"root and test are the same folder, {root}; pass another one, or a share of it.")
        if parts[0].classes != parts[-1].classes:
            raise ValueError(f"{root} has the classes {parts[0].classes} to train and {parts[-1].classes} to test.")
        if len(parts[0].classes) < 2:
            raise ValueError(f"{folders[0]} has only one class, {parts[0].classes[0]}; pass a folder with more.")
        pairs = [(torch.stack([image for image, _ in part]), torch.tensor(part.targets)) for part in parts]
        return cls._of(root.name, *(pairs if len(pairs) == 2 else _split(*pairs[0], test, seed)))

    @classmethod
    def _of(cls, name: str, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Data:
        known, tested = (set(labels.tolist()) for _, labels in (train, test))
        missing = next(label for label in range(len(known) + 1) if label not in known)
        if missing <= max(known | tested):
            raise ValueError(
                f"no training example has the label {missing}, but labels go to {max(known | tested)}; pass labels"
                " without gaps, such as numpy.unique(y, return_inverse=True)[1], and each one to train."
            )
        return cls(name, train, test, len(known), *moments(train[0]))

    def rotated(self, seed: int = 0) -> Data:
        """Rotate each training and test image once, by a separate angle from U[-π, π] (Appendix I.5).

        This turns MNIST into RotMNIST. Interpolation is bilinear, with black outside. x keeps its dtype, so bytes are
        rounded. The angles of test images do not depend on the training set.

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


def _parts(root: Path) -> list[Path]:
    """Return the folders train and test of root if it has these two, or root alone."""
    folders = _subfolders(root)
    names = {name.lower(): path for name, path in folders.items()}
    if names.keys() == {"train", "test"} and len(folders) == 2:
        return [names["train"], names["test"]]
    inside = {name: _subfolders(folder).keys() for name, folder in names.items()}
    for name in names:
        if "train" in name and (others := [one for one in names if one != name and inside[one] & inside[name]]):
            raise ValueError(
                f"{root} has {name} and {others[0]}, which have the same subfolders and are no classes; pass"
                " root=TRAINING and test=TEST, or a folder with train and test alone."
            )
    return [root]


def _subfolders(folder: Path) -> dict[str, Path]:
    """Return the subfolders that are not hidden, by name."""
    return {path.name: path for path in folder.iterdir() if path.is_dir() and path.name[0] != "."}


def _images(folder: Path, height: int, width: int):
    """Return torchvision's ImageFolder without hidden files and folders, such as .ipynb_checkpoints."""
    from torchvision.datasets import ImageFolder
    from torchvision.datasets.folder import IMG_EXTENSIONS

    class Images(ImageFolder):
        def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
            classes = [name for name in super().find_classes(directory)[0] if name[0] != "."]
            return classes, {name: label for label, name in enumerate(classes)}

    def shown(path: str) -> bool:
        return path.lower().endswith(IMG_EXTENSIONS) and "/." not in f"/{Path(path).relative_to(folder).as_posix()}"

    return Images(folder, loader=partial(_decoded, height=height, width=width), is_valid_file=shown)


def _decoded(path: str, height: int, width: int) -> Tensor:
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as picture:
            # Conversion would clip the first two to white, and PIL cuts several channels of 16 bits to 8.
            if picture.mode.startswith(("I", "F")) or any(";16" in str(tile[-1]) for tile in picture.tile):
                raise ValueError(f"{path} has more than 8 bits a channel (mode {picture.mode}); convert it to 8 bits.")
            picture.load()
            with suppress(Exception):  # of many kinds; a picture with damaged EXIF data is left as it is
                picture = ImageOps.exif_transpose(picture)
            image = ImageOps.fit(picture.convert("RGB"), (width, height))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # SyntaxError is that of a damaged PNG
        raise OSError(f"{path} cannot be read ({error}); remove it, or save it again as PNG or JPEG.") from error
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)


def _check_share(test: Any) -> None:
    if isinstance(test, bool) or not isinstance(test, Real) or not 0 < test < 1:
        raise ValueError(f"test={test!r}; pass a share between 0 and 1.")


def _split(x: Tensor, y: Tensor, test: Any, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return the training and the test set, which is a share of the examples of each class, chosen at random."""
    _check_share(test)
    classes = y.unique(return_inverse=True)[1]
    if classes.bincount().max() < 2:
        raise ValueError("each class has a single example, so that none can be split off to test; pass more examples.")
    parts = stratified(classes, (1 - test, test), Generator().manual_seed(seed))
    if len(parts.unique()) < 2:
        raise ValueError(f"test={test} of {len(y)} examples leaves none to train or to test; pass another share.")
    return [(x[parts == part], y[parts == part]) for part in (0, 1)]


def _pair(what: str, pair: Sequence) -> tuple[Tensor, Tensor]:
    """Return x, in float32 or uint8, and labels in int64."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(f"{what} is a {type(pair).__name__}; pass (x, y), images or features and labels.")
    x, y = (as_tensor(part).cpu() for part in pair)
    if x.is_complex() or y.is_complex():
        raise TypeError(f"{what} has complex numbers; pass real ones, such as numpy.stack([z.real, z.imag], 1).")
    x = x[:, None] if x.dim() == 3 else x
    if x.dim() == 4 and x.dtype != torch.uint8 and not x.is_floating_point():
        kind = str(x.dtype).removeprefix("torch.")
        raise TypeError(f"{what} has images of {kind}; pass uint8 in 0..255, or floats in [0, 1].")
    given, x = x, x.to(torch.uint8 if x.dtype == torch.uint8 else torch.float32, copy=True)
    if y.is_floating_point():
        raise TypeError(f"{what} has labels of {str(y.dtype).removeprefix('torch.')}; pass whole numbers from 0.")
    if x.dim() not in (2, 4) or y.shape != x.shape[:1] or not x.numel():
        raise ValueError(
            f"{what} has x of shape {list(x.shape)} and y of {list(y.shape)}; pass images [n, channels, height, width]"
            " or [n, height, width], or features [n, features], and labels [n]."
        )
    if x.dim() == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        raise ValueError(f"{what} has images {list(x.shape)}, with channels last; pass x.transpose(0, 3, 1, 2).")
    if not bool(x.isfinite().all()) or int(y.min()) < 0:
        raise ValueError(f"{what} has {'a negative label' if int(y.min()) < 0 else 'NaN or infinite numbers'}.")
    if x.dim() == 4 and x.is_floating_point() and not -ROUNDING <= x.min() <= x.max() <= 1 + ROUNDING:
        raise ValueError(
            f"{what} has images from {x.min():.4g} to {x.max():.4g}; pass uint8 in 0..255, or floats in [0, 1], and"
            " normalise in the model by data.Normalise."
        )
    if x.dim() == 2 and bool((lost := (given.amin(0) < given.amax(0)) & (x.amin(0) == x.amax(0))).any()):
        raise ValueError(
            f"feature {int(lost.nonzero()[0])} of {what} is the same number for all examples in float32; subtract its"
            " mean and divide by its standard deviation."
        )
    return x, y.to(torch.int64, copy=True)


def moments(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each channel, over all examples and pixels.

    The standard deviation of a constant channel or feature is given as 1, so that Normalise makes it 0.

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
    variance = squares / count - mean.square()
    constant = variance <= 1e-14 * squares / count  # below the precision of float32
    std = variance.clamp(min=0).sqrt()
    unit = 1 if x.is_floating_point() else 255
    return tuple((mean / unit).tolist()), tuple(torch.where(constant, 1, std / unit).tolist())


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


def digits(size: int = 16, *, test: int = 500, seed: int = 0) -> Data:
    """Load the 1797 digits of scikit-learn, enlarged bilinearly and split at random. Needs scikit-learn.

    Args:
        size: height and width of the images, at least 1; 8 leaves them unchanged.
        test: the number of test examples, 1..1796; the others are for training.
        seed: an int in [0, 2**63), seed of the split.

    Returns:
        Images float32 [n, 1, size, size] in [0, 1].

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: a number is out of range.

    Example:
        >>> digits()
        Data(digits: 1297 examples to train and 500 to test, [1, 16, 16] of float32, 10 classes)
    """
    check_seed("seed", seed)
    check_at_least(1, size=size, test=test)
    if test >= EXAMPLES:
        raise ValueError(f"test={test}, but there are {EXAMPLES} digits; pass 1..{EXAMPLES - 1}.")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("digits come with scikit-learn; pip install scikit-learn.") from error
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32, device="cpu").view(-1, 1, 8, 8) / 16
    images = F.interpolate(images, (size, size), mode="bilinear", align_corners=False)
    order = torch.randperm(EXAMPLES, generator=Generator().manual_seed(seed), device="cpu")
    images, labels = images[order], torch.tensor(labels, dtype=torch.int64, device="cpu")[order]
    train = images[:-test], labels[:-test]
    return Data("digits", train, (images[-test:], labels[-test:]), 10, *moments(train[0]))
