"""Image folders with one subfolder for each class, read by torchvision's ImageFolder."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from tqdm import tqdm

# If there are folders for both test and validation, the images of the latter join the training set.
TRAIN, TESTS = "train", ("test", "val", "valid", "validation")
# Pillow's modes of grey images, and of more than 8 bits a channel, which conversion would clip to white.
GREY, DEEP = ("1", "L", "LA"), ("I", "F")

Files = list[tuple[str, int]]


def find(root: Path) -> tuple[list[Files], list[str]]:
    """Return (path, label) of each image of all parts, training and test first, and the names of the classes.

    Raises:
        FileNotFoundError: the folder, its classes or the images of a class are missing.
        ValueError: a class is only in the test part, or root has parts of other names.
    """
    try:
        datasets = import_module("torchvision.datasets")
    except (ImportError, RuntimeError) as error:  # RuntimeError if it was built for another PyTorch
        cure = f"pip install the torchvision that belongs to PyTorch {torch.__version__}"
        raise ImportError(f"torchvision, which reads these files, cannot be imported ({error}); {cure}.") from error
    has_parts = (root / TRAIN).is_dir()
    train = root / TRAIN if has_parts else root
    parts = [train, *(root / name for name in TESTS if has_parts and (root / name).is_dir())]
    folders = [datasets.ImageFolder(str(part)) for part in parts]
    labels = folders[0].class_to_idx
    for part, folder in zip(parts, folders, strict=True):
        if strange := sorted(set(folder.classes) - set(labels)):
            raise ValueError(f"{part} has the classes {', '.join(strange)}, and {train} does not; name them alike.")
        for name in folder.classes:  # torchvision searches all subfolders, so splits of other names would be classes
            inside = [path.is_dir() for path in (part / name).iterdir()]
            if len(inside) > 1 and all(inside):
                raise ValueError(f"{part / name} has folders and no images; name parts train and test.")
    found = [[(path, labels[folder.classes[label]]) for path, label in folder.samples] for folder in folders]
    return found, folders[0].classes


def decode(files: Files, size: int | tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """Return images uint8 [n, channels, height, width], of one channel if all are grey, and labels int64 [n].

    Args:
        files: (path, label) of each image.
        size: height and width to which images are scaled and cropped; None if all have the same size.

    Raises:
        ValueError: an image is damaged, has more than 8 bits a channel, or size is None and sizes differ.
    """
    both = (size, size) if isinstance(size, int) else size
    is_size = isinstance(both, tuple | list) and [type(each) for each in both] == [int, int] and min(both) > 0
    if not (both is None or is_size):
        raise ValueError(f"size={size!r}; pass a positive int, or height and width.")
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
    return images, torch.tensor([label for _, label in files], device="cpu")


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
