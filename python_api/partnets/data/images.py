"""MNIST, CIFAR-10 and Tiny ImageNet from local files; nothing is ever downloaded.

Beyond torchvision, files may be in any folder, errors name the missing or damaged file, and Tiny ImageNet's label lists
are read: wnids.txt and the annotations of the validation set. torchvision reads the images of the latter two data sets
and is imported when they are loaded.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from importlib import import_module
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from partnets.data.dataset import Data, moments
from partnets.data.folders import import_torchvision

# CIFAR-10's constants, rounded as in published code for the rotated data sets.
MEAN = (125.3 / 255, 123.0 / 255, 113.9 / 255)
STD = (63.0 / 255, 62.1 / 255, 66.7 / 255)
IDX = "an official file, gunzipped"
PICKLE = "a file of cifar-10-python.tar.gz, unpacked"
# Pillow formats of files named .JPEG; this excludes formats that Pillow decodes by other programs, such as EPS.
FORMATS = ("JPEG", "PNG")
JPEG = "train/*/images/*.JPEG"
WNIDS = "a WordNet id a line"
ANNOTATIONS = "lines of a file's name, a tab and a WordNet id of wnids.txt"
# Largest file sizes in bytes. EMNIST's images, the largest file in MNIST's format, have 547 million; Tiny ImageNet's
# longest list has half a million.
LARGEST_IDX, LARGEST_LIST = 600_000_000, 10_000_000


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

    Example:
        >>> import tempfile
        >>> images = bytes([0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 28, 0, 0, 0, 28]) + bytes(28 * 28)
        >>> labels = bytes([0, 0, 8, 1, 0, 0, 0, 1]) + bytes([7])
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for part in ("train", "t10k"):
        ...         _ = Path(root, f"{part}-images-idx3-ubyte").write_bytes(images)
        ...         _ = Path(root, f"{part}-labels-idx1-ubyte").write_bytes(labels)
        ...     mnist(root)
        Data(mnist: 1 examples to train and 1 to test, [1, 28, 28] of uint8, 10 classes)
    """
    folder = _find(root, ["train-images-idx3-ubyte", "MNIST/raw/train-images-idx3-ubyte"], IDX).parent

    def part(name: str) -> tuple[Tensor, Tensor]:
        images, labels = _idx(folder, f"{name}-images-idx3-ubyte", 3), _idx(folder, f"{name}-labels-idx1-ubyte", 1)
        labels = labels.long()
        if images.shape != (len(labels), 28, 28) or labels.max() > 9:
            found = f"has {len(labels)} labels up to {labels.max()} for images {list(images.shape)}"
            raise _damaged(folder / f"{name}-*", found, "a label in 0..9 for each image of 28x28")
        return images[:, None], labels

    train, test = part("train"), part("t10k")
    return Data("mnist", train, test, 10, *moments(train[0]))


def _idx(folder: Path, name: str, dims: int) -> Tensor:
    """Read a file of bytes in IDX format: 0, 0, 8, number of dimensions, sizes as big-endian 32-bit words, bytes."""
    path = _find(folder, [name], IDX)
    _check_size(path, LARGEST_IDX, IDX)
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
            cifar10/test/<class>/*.png, a common form of copies, which Data.from_folder reads.

    Returns:
        Images uint8 [n, 3, 32, 32], red, green and blue. mean and std are the constants of published code.

    Raises:
        ImportError: torchvision is not installed.
        FileNotFoundError: a file is missing. The binary version, cifar-10-batches-bin, is not read.
        ValueError: a file is not the official one, or images are not of ten classes, 32x32 and in colour.

    Example:
        >>> cifar10("nowhere")
        Traceback (most recent call last):
        FileNotFoundError: there is no nowhere/cifar-10-batches-py/data_batch_1, and no nowhere/data_batch_1; expected a file of cifar-10-python.tar.gz, unpacked. Nothing is downloaded: put the official files there, or pass the folder that holds them as root.
    """  # noqa: E501, a message is one line
    datasets = import_torchvision("datasets")
    if (images := Path(root, "cifar10")).is_dir():
        return _cifar10_images(images)

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


def _cifar10_images(root: Path) -> Data:
    # The official labels are in the order of the classes' names.
    found = Data.from_folder(root)
    shape = list(found.train[0].shape[1:])
    if shape != [3, 32, 32] or found.classes != 10:
        raise _damaged(root, f"has {found.classes} classes of images {shape}", "10 classes of 32x32, in colour")
    return Data("cifar10", found.train, found.test, 10, MEAN, STD)


def tiny_imagenet(root: str | PathLike) -> Data:
    """Read Tiny ImageNet (Le and Yang 2015): 100000 training images, and its 10000 validation images as the test set.

    The official test set has no labels. Decoding takes a minute or more, with a progress bar in a terminal; grey images
    are converted to colour. Needs torchvision.

    Args:
        root: a folder with the content of tiny-imagenet-200.zip, or with that of its tiny-imagenet-200: wnids.txt,
            train/<wnid>/images/*.JPEG, val/val_annotations.txt and val/images/*.JPEG.

    Returns:
        Images uint8 [n, 3, 64, 64], red, green and blue, one for each file; label i is line i + 1 of wnids.txt.

    Raises:
        ImportError: torchvision is not installed.
        FileNotFoundError: a file is missing; raised before decoding.
        ValueError: a file is damaged.

    Example:
        >>> tiny_imagenet("nowhere")
        Traceback (most recent call last):
        FileNotFoundError: there is no nowhere/wnids.txt, and no nowhere/tiny-imagenet-200/wnids.txt; expected a WordNet id a line. Nothing is downloaded: put the official files there, or pass the folder that holds them as root.
    """  # noqa: E501, a message is one line
    folders, pillow = import_torchvision("datasets.folder"), import_module("PIL.Image")
    wnids_path = _find(root, ["wnids.txt", "tiny-imagenet-200/wnids.txt"], WNIDS)
    folder, wnids = wnids_path.parent, _text(wnids_path, WNIDS).split()
    if not wnids or len(set(wnids)) < len(wnids):
        raise _damaged(wnids_path, f"has {len(wnids)} lines, {len(set(wnids))} distinct", WNIDS)
    labels = {wnid: label for label, wnid in enumerate(wnids)}
    try:
        train = folders.make_dataset(folder / "train", labels, is_valid_file=lambda path: Path(path).match(JPEG))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}Expected {folder}/{JPEG} in each class of {wnids_path}.") from error
    train.sort(key=lambda sample: sample[1])  # torchvision sorts by class, not by label; the sort is stable
    test = _validation_files(folder, labels)

    def decode(samples: list[tuple[str | Path, int]], what: str) -> tuple[Tensor, Tensor]:
        images = torch.empty(len(samples), 3, 64, 64, dtype=torch.uint8, device="cpu")
        for image, (path, _) in zip(images.numpy(), tqdm(samples, what, unit=" images", disable=None), strict=True):
            try:
                with pillow.open(path, formats=FORMATS) as picture:
                    width, height = picture.size  # known before decoding
                    if width == height == 64:
                        image.transpose(1, 2, 0)[:] = picture.convert("RGB")
            except Exception as error:  # Pillow raises many types
                raise _damaged(path, f"cannot be decoded ({error})", "an image of 64x64") from error
            if not width == height == 64:
                raise _damaged(path, f"is an image of {width}x{height}", "one of 64x64")
        return images, torch.tensor([label for _, label in samples], device="cpu")

    train, test = decode(train, "training images"), decode(test, "test images")
    return Data("tiny-imagenet", train, test, len(wnids), *moments(train[0]))


def _validation_files(folder: Path, labels: dict[str, int]) -> list[tuple[Path, int]]:
    annotations = _find(folder, ["val/val_annotations.txt"], ANNOTATIONS)
    samples = []
    for number, line in enumerate(_text(annotations, ANNOTATIONS).splitlines(), start=1):
        name, wnid = (*line.split("\t"), "")[:2]
        if wnid not in labels:
            raise _damaged(annotations, f"has {line!r} as line {number}", ANNOTATIONS)
        samples.append((_find(folder, [f"val/images/{name}"], "an image that val_annotations.txt names"), labels[wnid]))
    images = sum(1 for _ in (folder / "val/images").glob("*.JPEG"))
    if len(samples) != images or not samples:
        raise _damaged(annotations, f"has {len(samples)} lines", f"{ANNOTATIONS}: one for each of the {images} images")
    return samples


def _check_size(path: Path, most: int, expected: str) -> None:
    if (size := path.stat().st_size) > most:
        raise _damaged(path, f"has {size} bytes", f"{expected}, of {most} bytes at most")


def _text(path: Path, expected: str) -> str:
    _check_size(path, LARGEST_LIST, expected)
    return path.read_text(errors="replace")


def _find(root: str | PathLike, names: Sequence[str], expected: str) -> Path:
    paths = [Path(root, name) for name in names]
    for path in paths:
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"there is no {', and no '.join(map(str, paths))}; expected {expected}. Nothing is downloaded: put the official"
        " files there, or pass the folder that holds them as root."
    )


def _damaged(path: str | Path, found: str, expected: str) -> ValueError:
    return ValueError(f"{path} {found}; expected {expected}. Copy it again from the official archive.")
