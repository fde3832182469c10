"""Image folders with one subfolder for each class, as in torchvision's ImageFolder."""

from __future__ import annotations

import mimetypes
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Generator, Tensor
from tqdm import tqdm

from partnets.data.splitting import stratified

# If there are folders for both test and validation, the images of the latter join the training set.
TRAIN, TEST, VALIDATE = "train", "test", ("val", "valid", "validation")
# Names of parts of a data set, unlikely for a class.
PARTS = re.compile("(train|test|val|eval|dev|held)", re.IGNORECASE)
EXPECTED = "a folder with a folder of images for each class, or with two such folders, train and test"
# Pillow's modes of grey images, and of more than 8 bits a channel, which conversion would clip to white.
GREY, DEEP = ("1", "L", "LA"), ("I", "F")


class Files(NamedTuple):
    """The images of a folder: (path, label) of each training and test image, and the names of the classes."""

    train: list[tuple[str, int]]
    test: list[tuple[str, int]]
    classes: list[str]


def find(root: Path, test: float, seed: int) -> Files:
    """Find the images of a folder; without a test part, split each class at random.

    Raises:
        FileNotFoundError: the folder, its classes or the images of a class are missing.
        ValueError: a class is only in the test part, a part would be empty, or two paths lead to one file.
    """
    reader = import_torchvision("datasets.folder")
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}; pass {EXPECTED}.")
    train = root / TRAIN if (root / TRAIN).is_dir() else None
    others = [root / name for name in (TEST, *VALIDATE) if train and (root / name).is_dir()]
    labels = _labels(reader, train or root)
    if labels and all(map(PARTS.match, labels)):
        raise ValueError(f"{train or root} has the folders {', '.join(labels)}; name them train and test, or classes.")
    parts = [_listed(reader, train or root, labels), *(_listed(reader, other, labels, train) for other in others)]
    _check_distinct([path for part in parts for path, _ in part])
    if not others:
        return Files(*_split(parts[0], test, seed), list(labels))
    trained = [file for part in (parts[0], *parts[2:]) for file in part]
    return Files(trained, parts[1], list(labels))


def _labels(reader: ModuleType, root: Path) -> dict[str, int]:
    try:
        names = [name for name in reader.find_classes(str(root))[0] if not name.startswith(".")]
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{root} has no folders; pass {EXPECTED}.") from error
    return {name: label for label, name in enumerate(names)}


def _listed(reader: ModuleType, root: Path, labels: dict[str, int], train: Path | None = None) -> list[tuple[str, int]]:
    """Return (path, label) of each image; for parts other than `train`, of the classes in that part."""
    if train is not None:
        own = _labels(reader, root)
        if strange := sorted(own.keys() - labels.keys()):
            raise ValueError(f"{root} has the classes {', '.join(strange)}, and {train} does not; name them alike.")
        labels = {name: label for name, label in labels.items() if name in own}
    found = reader.make_dataset(str(root), labels, is_valid_file=_is_image)
    # Hidden files and folders are copies, as in .ipynb_checkpoints, or not images.
    found = [(path, label) for path, label in found if "/." not in f"/{Path(path).relative_to(root).as_posix()}"]
    # torchvision searches all subfolders, so splits of other names would pass as classes.
    for name, label in labels.items():
        below = {Path(path).relative_to(root / name).parts[0] for path, of in found if of == label}
        if len(below) > 1 and all((root / name / each).is_dir() for each in below):
            raise ValueError(f"{root / name} has folders and no images; pass {EXPECTED}.")
    return found


def _is_image(path: str) -> bool:
    """Return whether the suffix is an image format, readable by Pillow or not; unreadable ones raise later."""
    pillow = import_module("PIL.Image")
    format = pillow.registered_extensions().get(Path(path).suffix.lower())
    kind = pillow.MIME.get(format) if format in pillow.OPEN else mimetypes.guess_type(path)[0]
    return (kind or "").startswith("image/")


def _check_distinct(paths: list[str]) -> None:
    """Raise ValueError if two paths link to one file, which would be counted, or tested, twice."""
    first: dict[str, str] = {}
    for path in paths:
        if (other := first.setdefault(os.path.realpath(path), path)) != path:
            raise ValueError(f"{other} and {path} are one file; leave out one of the links.")


def _split(files: list[tuple[str, int]], test: float, seed: int) -> tuple[list, list]:
    labels = torch.tensor([label for _, label in files], device="cpu")
    parts = share_off(labels, test, seed).tolist()
    train, tested = ([file for file, part in zip(files, parts, strict=True) if part == which] for which in (0, 1))
    if not train or not tested:
        raise ValueError(f"test={test} leaves no image of {len(files)} to {'test' if train else 'train'}; add images.")
    return train, tested


def share_off(labels: Tensor, test: Any, seed: int) -> Tensor:
    """Return 1 for a share of the examples of each class, chosen at random, and 0 for the others.

    Raises:
        ValueError: test is not between 0 and 1, or no class has two examples.
    """
    if isinstance(test, bool) or not isinstance(test, Real) or not 0 < test < 1:
        raise ValueError(f"test={test!r}; pass a share between 0 and 1.")
    classes = labels.unique(return_inverse=True)[1]
    if len(classes) and classes.bincount().max() < 2:
        raise ValueError("each class has a single example, so that none can be split off to test; pass more examples.")
    return stratified(classes, (1 - test, test), Generator().manual_seed(seed))


def decode(parts: Sequence[list[tuple[str, int]]], size: int | tuple[int, int] | None) -> list[tuple[Tensor, Tensor]]:
    """Decode the images of each part; all have one channel if all are grey, and otherwise three.

    Args:
        parts: (path, label) of each image.
        size: height and width to which images are scaled and cropped; None if all have the same size.

    Returns:
        For each part images uint8 [n, channels, height, width] and labels int64 [n].

    Raises:
        ValueError: an image is damaged, has more than 8 bits a channel, or size is None and sizes differ.
    """
    height_width = (size, size) if isinstance(size, int) else size
    if height_width is not None and not _is_size(height_width):
        raise ValueError(f"size={size!r}; pass a positive int, or height and width.")
    files = [file for part in parts for file in part]
    images, grey = _decoded([path for path, _ in files], height_width)
    images = images[:, :1].contiguous() if grey else images
    labels = torch.tensor([label for _, label in files], device="cpu")
    lengths = [len(part) for part in parts]
    return list(zip(images.split(lengths), labels.split(lengths), strict=True))


def _is_size(size: Any) -> bool:
    ints = isinstance(size, tuple | list) and len(size) == 2 and {type(each) for each in size} == {int}
    return ints and min(size) > 0


def _decoded(paths: list[str], size: tuple[int, int] | None) -> tuple[Tensor, bool]:
    """Return images [n, 3, height, width], and whether all are grey; without size, all need the first one's."""
    pillow, grey = import_module("PIL.ImageOps"), True
    images = torch.empty(len(paths), 3, *(size or (0, 0)), dtype=torch.uint8, device="cpu")
    for i, path in enumerate(tqdm(paths, unit=" images", disable=None)):
        with _opened(path) as picture:
            mode = picture.mode
            upright = pillow.exif_transpose(picture).convert("RGB")
        if mode.startswith(DEEP):
            raise ValueError(f"{path} has more than 8 bits a channel (mode {mode}); convert it to 8 bits.")
        grey &= mode in GREY
        width, height = upright.size
        if i == 0 and size is None:
            images = images.new_empty(len(paths), 3, height, width)
        if [height, width] != list(images.shape[2:]):
            if size is None:
                first = "x".join(map(str, images.shape[2:]))
                raise ValueError(
                    f"{path} is an image of {height}x{width}, and {paths[0]} of {first}; pass size=, to which images"
                    " are scaled and cropped."
                )
            upright = pillow.fit(upright, (images.shape[3], images.shape[2]))
        images[i] = torch.from_numpy(numpy.array(upright)).permute(2, 0, 1)
    return images, grey


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    try:
        with import_module("PIL.Image").open(path) as image:
            yield image
    except Exception as error:  # Pillow raises many types
        raise ValueError(f"{path} cannot be decoded ({error}); convert, replace or delete it.") from error


def import_torchvision(module: str) -> ModuleType:
    """Import a module of torchvision.

    Raises:
        ImportError: it is not installed, or was built for another PyTorch.
    """
    try:
        return import_module(f"torchvision.{module}")
    except (ImportError, RuntimeError) as error:  # RuntimeError if it was built for another PyTorch
        cure = f"pip install the torchvision that belongs to PyTorch {torch.__version__}"
        raise ImportError(f"torchvision, which reads these files, cannot be imported ({error}); {cure}.") from error
