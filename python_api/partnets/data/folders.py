"""Image folders with one subfolder for each class, as in torchvision's ImageFolder."""

from __future__ import annotations

from collections.abc import Sequence
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
        ValueError: a class is only in the test part, or a part would be empty.
    """
    try:
        reader = import_module("torchvision.datasets.folder")
    except (ImportError, RuntimeError) as error:  # RuntimeError if it was built for another PyTorch
        cure = f"pip install the torchvision that belongs to PyTorch {torch.__version__}"
        raise ImportError(f"torchvision, which reads these files, cannot be imported ({error}); {cure}.") from error
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}; pass {EXPECTED}.")
    has_parts = (root / TRAIN).is_dir()
    train = root / TRAIN if has_parts else root
    others = [root / name for name in (TEST, *VALIDATE) if has_parts and (root / name).is_dir()]
    classes = _classes(train)
    parts = [_images(reader, part, classes) for part in (train, *others)]
    if others:
        return Files([file for part in (parts[0], *parts[2:]) for file in part], parts[1], classes)
    is_tested = share_off(torch.tensor([label for _, label in parts[0]], device="cpu"), test, seed).tolist()
    split = [[file for file, which in zip(parts[0], is_tested, strict=True) if which == part] for part in (0, 1)]
    if not all(split):
        raise ValueError(f"test={test} leaves a part of {len(parts[0])} images empty; add images.")
    return Files(*split, classes)


def _classes(root: Path) -> list[str]:
    """Return the names of the folders, without hidden ones such as .ipynb_checkpoints."""
    found = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not found:
        raise FileNotFoundError(f"{root} has no folders; pass {EXPECTED}.")
    return found


def _images(reader: ModuleType, root: Path, classes: list[str]) -> list[tuple[str, int]]:
    """Return (path, label) of each image of the classes in a part of the data."""
    own = _classes(root)
    if strange := sorted(set(own) - set(classes)):
        raise ValueError(f"{root} has the classes {', '.join(strange)}, which the training part does not have.")
    labels = {name: label for label, name in enumerate(classes) if name in own}
    found = reader.make_dataset(str(root), labels, extensions=reader.IMG_EXTENSIONS)
    found = [(path, label) for path, label in found if "/." not in f"/{Path(path).relative_to(root).as_posix()}"]
    # torchvision searches all subfolders, so splits of other names would pass as classes.
    for name, label in labels.items():
        below = {Path(path).relative_to(root / name).parts[0] for path, of in found if of == label}
        if len(below) > 1 and all((root / name / each).is_dir() for each in below):
            raise ValueError(f"{root / name} has folders and no images; pass {EXPECTED}.")
    return found


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
    both = (size, size) if isinstance(size, int) else size
    is_size = isinstance(both, tuple | list) and [type(each) for each in both] == [int, int] and min(both) > 0
    if not (both is None or is_size):
        raise ValueError(f"size={size!r}; pass a positive int, or height and width.")
    files = [file for part in parts for file in part]
    pillow, images, is_grey = import_module("PIL.ImageOps"), None, True
    for i, (path, _) in enumerate(tqdm(files, unit=" images", disable=None)):
        mode, upright = _decoded(path)
        is_grey &= mode in GREY
        width, height = both[::-1] if both else upright.size
        if images is None:
            images = torch.empty(len(files), 3, height, width, dtype=torch.uint8, device="cpu")
        if (height, width) != tuple(images.shape[2:]):
            first = "x".join(map(str, images.shape[2:]))
            raise ValueError(
                f"{path} is an image of {height}x{width}, and {files[0][0]} of {first}; pass size=, to which images"
                " are scaled and cropped."
            )
        upright = upright if upright.size == (width, height) else pillow.fit(upright, (width, height))
        images[i] = torch.from_numpy(numpy.array(upright)).permute(2, 0, 1)
    images = images[:, :1].contiguous() if is_grey else images
    labels = torch.tensor([label for _, label in files], device="cpu")
    lengths = [len(part) for part in parts]
    return list(zip(images.split(lengths), labels.split(lengths), strict=True))


def _decoded(path: str) -> tuple[str, Any]:
    """Return the mode of an image file, and its picture in RGB, upright by its EXIF orientation."""
    try:
        with import_module("PIL.Image").open(path) as image:
            mode, upright = image.mode, import_module("PIL.ImageOps").exif_transpose(image).convert("RGB")
    except Exception as error:  # Pillow raises many types
        raise ValueError(f"{path} cannot be decoded ({error}); convert, replace or delete it.") from error
    if mode.startswith(DEEP):
        raise ValueError(f"{path} has more than 8 bits a channel (mode {mode}); convert it to 8 bits.")
    return mode, upright
