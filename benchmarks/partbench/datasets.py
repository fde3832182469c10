"""Data sets of experiments by name, from local files; nothing is ever downloaded.

torchvision reads CIFAR-10, and is imported when that is loaded.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

import numpy
import torch
from PIL import Image
from torch import Generator, Tensor
from tqdm import tqdm

from partkernels.arguments import check_seed
from partnets.data import Data, digits, moments

# CIFAR-10's constants, rounded as in published code for the rotated data sets.
MEAN = (125.3 / 255, 123.0 / 255, 113.9 / 255)
STD = (63.0 / 255, 62.1 / 255, 66.7 / 255)
IDX = "an official file, gunzipped"
PICKLE = "a file of cifar-10-python.tar.gz, unpacked"
WNIDS = "a WordNet id a line"
ANNOTATIONS = "lines of a file's name, a tab and a WordNet id of wnids.txt"


def load(name: str, root: str | PathLike | None = None, *, rotated: bool = False, seed: int = 0) -> Data:
    """Load 'digits', 'mnist', 'cifar10' or 'tiny-imagenet', upright or rotated.

    Args:
        name: one of these.
        root: the folder of the files, as in the function of this name. By default the environment variable
            PARTNETS_DATA, or ./data. One folder can hold all data sets. digits needs none.
        rotated: whether to rotate each image by a separate angle, as in Data.rotated.
        seed: an int in [0, 2**63), seed of the angles and of the split of digits.

    Raises:
        ValueError: the name is unknown, seed is out of range, or a file is damaged.
        FileNotFoundError: a file is missing.
        ImportError: scikit-learn, for digits, or torchvision, for CIFAR-10, is not installed.

    Example:
        >>> load("digits", rotated=True)
        Data(rotated-digits: 1297 examples to train and 500 to test, [1, 16, 16] of float32, 10 classes)
    """
    check_seed("seed", seed)
    if name == "digits":
        data = digits(seed=seed)
    elif name in FROM_FILES:
        data = FROM_FILES[name](root or _root())
    else:
        raise ValueError(f"there is no data set {name!r}; pass one of {', '.join(('digits', *FROM_FILES))}.")
    return data.rotated(seed) if rotated else data


def local_text(name: str, expected: str) -> str:
    """Return the text of a file in the folder PARTNETS_DATA, or ./data.

    Raises:
        FileNotFoundError: the file is missing; the message says what is `expected`.
    """
    return _find(_root(), [name], expected).read_text(encoding="utf-8")


def _root() -> str:
    return os.environ.get("PARTNETS_DATA") or "data"


def subset(data: Data, n: int, seed: int = 0) -> Data:
    """Return n random training examples and all test examples; with one seed, smaller subsets are in larger ones.

    Raises:
        ValueError: n is not between 1 and the number of training examples, or seed is out of range.

    Example:
        >>> x, y = torch.rand(10, 2), torch.arange(10)
        >>> data = Data("ten", (x, y), (x, y), 10, *moments(x))
        >>> set(subset(data, 3).train[1].tolist()) < set(subset(data, 5).train[1].tolist())
        True
    """
    check_seed("seed", seed)
    x, y = data.train
    if not 1 <= n <= len(x):
        raise ValueError(f"n={n!r}, but {data.name} has {len(x)} training examples; pass an int in 1..{len(x)}.")
    chosen = torch.randperm(len(x), generator=Generator().manual_seed(seed), device="cpu")[:n]
    angles = None if data.angles is None else data.angles[chosen]
    return replace(data, train=(x[chosen], y[chosen]), angles=angles)


def mnist(root: str | PathLike) -> Data:
    """Read MNIST (LeCun et al. 1998): 60000 training and 10000 test images.

    Args:
        root: a folder with MNIST/raw, as torchvision writes it, or with the official files, gunzipped:
            train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte.

    Returns:
        Images uint8 [n, 1, 28, 28]; as many as the files hold.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or images and labels differ in number.
    """
    folder = _find(root, ["train-images-idx3-ubyte", "MNIST/raw/train-images-idx3-ubyte"], IDX).parent

    def part(name: str) -> tuple[Tensor, Tensor]:
        images, labels = _idx(folder, f"{name}-images-idx3-ubyte", 3), _idx(folder, f"{name}-labels-idx1-ubyte", 1)
        if images.shape != (len(labels), 28, 28) or labels.max() > 9:
            found = f"has {len(labels)} labels up to {labels.max()} for images {list(images.shape)}"
            raise _damaged(folder / f"{name}-*", found, "a label in 0..9 for each image of 28x28")
        return images[:, None], labels.long()

    train, test = part("train"), part("t10k")
    return Data("mnist", train, test, 10, *moments(train[0]))


def _idx(folder: Path, name: str, dims: int) -> Tensor:
    """Read a file of bytes in IDX format: 0, 0, 8, number of dimensions, sizes as big-endian 32-bit words, bytes."""
    path = _find(folder, [name], IDX)
    found = path.read_bytes()
    if len(found) < 4 + 4 * dims or found[:4] != bytes([0, 0, 8, dims]):
        raise _damaged(path, f"begins with the bytes {list(found[:4])}", f"{IDX}, which begins with 0, 0, 8, {dims}")
    sizes = struct.unpack(f">{dims}I", found[4 : 4 + 4 * dims])
    if len(found) != 4 + 4 * dims + math.prod(sizes) or not math.prod(sizes):
        raise _damaged(path, f"has {len(found)} bytes for {' x '.join(map(str, sizes))}", IDX)
    return torch.frombuffer(bytearray(found[4 + 4 * dims :]), dtype=torch.uint8).view(sizes)


def cifar10(root: str | PathLike) -> Data:
    """Read CIFAR-10 (Krizhevsky 2009): 50000 training and 10000 test images. Needs torchvision.

    Args:
        root: a folder with cifar-10-batches-py, which is in cifar-10-python.tar.gz, or that folder itself:
            data_batch_1 to data_batch_5, test_batch and batches.meta. They are pickles, which can run code, and are
            read only if they have the official MD5. Or a folder with cifar10/train/<class>/*.png and
            cifar10/test/<class>/*.png, a common form of copies.

    Returns:
        Images uint8 [n, 3, 32, 32], red, green and blue. mean and std are the constants of published code.

    Raises:
        FileNotFoundError: a file is missing. The binary version, cifar-10-batches-bin, is not read.
        ValueError: a file is not the official one, or an image is not of 32x32.
    """
    from torchvision import datasets

    if (images := Path(root, "cifar10")).is_dir():
        # The official labels are in the order of the classes' names.
        train, test = (_decoded(datasets.ImageFolder(images / part).samples, 32) for part in ("train", "test"))
        return Data("cifar10", train, test, 10, MEAN, STD)

    class Files(datasets.CIFAR10):
        base_folder = ""  # makes root the folder of the files

    folder = _find(root, ["cifar-10-batches-py/data_batch_1", "data_batch_1"], PICKLE).parent
    for name, md5 in (*Files.train_list, *Files.test_list, (Files.meta["filename"], Files.meta["md5"])):
        path = _find(folder, [name], PICKLE)
        if not datasets.utils.check_integrity(path, md5):
            raise _damaged(path, f"has another MD5 than {md5}", PICKLE)

    def part(train: bool) -> tuple[Tensor, Tensor]:
        files = Files(folder, train=train)
        images = torch.from_numpy(files.data).permute(0, 3, 1, 2)  # from [n, 32, 32, 3]
        return images.contiguous(), torch.tensor(files.targets, device="cpu")

    return Data("cifar10", part(train=True), part(train=False), 10, MEAN, STD)


def tiny_imagenet(root: str | PathLike) -> Data:
    """Read Tiny ImageNet (Le and Yang 2015): 100000 training images, and its 10000 validation images as the test set.

    The official test set has no labels. Decoding takes a minute or more, with a progress bar in a terminal; grey images
    are converted to colour.

    Args:
        root: a folder with the content of tiny-imagenet-200.zip, or with that of its tiny-imagenet-200: wnids.txt,
            train/<wnid>/images/*.JPEG, val/val_annotations.txt and val/images/*.JPEG.

    Returns:
        Images uint8 [n, 3, 64, 64], red, green and blue, one for each file; label i is line i + 1 of wnids.txt.

    Raises:
        FileNotFoundError: a file is missing; raised before decoding.
        ValueError: a file is damaged, or images are not of 64x64.
    """
    wnids_path = _find(root, ["wnids.txt", "tiny-imagenet-200/wnids.txt"], WNIDS)
    folder, wnids = wnids_path.parent, wnids_path.read_text().split()
    if not wnids or len(set(wnids)) < len(wnids):
        raise _damaged(wnids_path, f"has {len(wnids)} lines, {len(set(wnids))} distinct", WNIDS)
    train = []
    for label, wnid in enumerate(wnids):
        paths = sorted((folder / "train" / wnid / "images").glob("*.JPEG"))
        if not paths:
            raise FileNotFoundError(f"there are no {folder}/train/{wnid}/images/*.JPEG, a class of {wnids_path}.")
        train += [(str(path), label) for path in paths]
    tested = _validation_files(folder, {wnid: label for label, wnid in enumerate(wnids)})
    train, test = _decoded(train, 64), _decoded(tested, 64)
    return Data("tiny-imagenet", train, test, len(wnids), *moments(train[0]))


def _decoded(files: list[tuple[str, int]], size: int) -> tuple[Tensor, Tensor]:
    """Return the images of (path, label), uint8 [n, 3, size, size], and the labels, int64 [n]."""
    images = torch.empty(len(files), 3, size, size, dtype=torch.uint8, device="cpu")
    for image, (path, _) in zip(images, tqdm(files, unit=" images", disable=None), strict=True):
        try:
            with Image.open(path, formats=("JPEG", "PNG")) as picture:
                pixels = numpy.array(picture.convert("RGB"))
        except Exception as error:  # Pillow raises many types
            raise _damaged(path, f"cannot be decoded ({error})", f"an image of {size}x{size}") from error
        if pixels.shape[:2] != (size, size):
            raise _damaged(path, f"is an image of {pixels.shape[1]}x{pixels.shape[0]}", f"one of {size}x{size}")
        image[:] = torch.from_numpy(pixels).permute(2, 0, 1)
    return images, torch.tensor([label for _, label in files], device="cpu")


def _validation_files(folder: Path, labels: dict[str, int]) -> list[tuple[str, int]]:
    annotations = _find(folder, ["val/val_annotations.txt"], ANNOTATIONS)
    samples = []
    for number, line in enumerate(annotations.read_text().splitlines(), start=1):
        name, wnid = (*line.split("\t"), "")[:2]
        if wnid not in labels:
            raise _damaged(annotations, f"has {line!r} as line {number}", ANNOTATIONS)
        path = _find(folder, [f"val/images/{name}"], "an image that val_annotations.txt names")
        samples.append((str(path), labels[wnid]))
    images = sum(1 for _ in (folder / "val/images").glob("*.JPEG"))
    if len(samples) != images or not samples:
        raise _damaged(annotations, f"has {len(samples)} lines", f"{ANNOTATIONS}: one for each of the {images} images")
    return samples


def _find(root: str | PathLike, names: Sequence[str], expected: str) -> Path:
    paths = [Path(root, name) for name in names]
    for path in paths:
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"there is no {', and no '.join(map(str, paths))}; expected {expected}. Nothing is downloaded: put the official"
        " files there, or set PARTNETS_DATA to the folder that holds them."
    )


def _damaged(path: str | Path, found: str, expected: str) -> ValueError:
    return ValueError(f"{path} {found}; expected {expected}. Copy it again from the official archive.")


FROM_FILES = {"mnist": mnist, "cifar10": cifar10, "tiny-imagenet": tiny_imagenet}
