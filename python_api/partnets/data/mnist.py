"""MNIST: 28x28 grey digits, from its four IDX files."""

from __future__ import annotations

from os import PathLike

from torch import Tensor

from partnets.data.dataset import Data, moments
from partnets.data.files import check_labels, damaged, find
from partnets.data.idx import read_idx

CLASSES = 10
FOLDERS = ("", "MNIST/raw/")  # the second as torchvision lays them


def mnist(root: str | PathLike) -> Data:
    """Reads MNIST (LeCun et al. 1998): 60000 training and 10000 test images.

    Args:
        root: the folder of the official files train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte
            and t10k-labels-idx1-ubyte, gzipped (.gz) or not, with a dot for the hyphen before idx or not; or the folder
            of MNIST/raw, in which torchvision puts them.

    Returns:
        Images uint8 [n, 1, 28, 28]; as many as the files hold.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or images and labels differ in number.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> images = bytes([0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 28, 0, 0, 0, 28]) + bytes(28 * 28)
        >>> labels = bytes([0, 0, 8, 1, 0, 0, 0, 1]) + bytes([7])
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for part in ("train", "t10k"):
        ...         _ = Path(root, f"{part}-images-idx3-ubyte").write_bytes(images)
        ...         _ = Path(root, f"{part}-labels-idx1-ubyte").write_bytes(labels)
        ...     mnist(root)
        Data(mnist: 1 examples to train and 1 to test, [1, 28, 28] of uint8, 10 classes)
    """
    train, test = _read(root, "train", 60000), _read(root, "t10k", 10000)
    return Data("mnist", train, test, CLASSES, *moments(train[0]))


def _read(root: str | PathLike, part: str, official: int) -> tuple[Tensor, Tensor]:
    images_path = find(
        root,
        [folder + name for folder in FOLDERS for name in _names(f"{part}-images", "idx3-ubyte")],
        f"{part} images of MNIST",
        f"IDX, {official} images of 28x28, {16 + official * 28 * 28} bytes when not gzipped",
    )
    labels_path = find(
        images_path.parent,
        _names(f"{part}-labels", "idx1-ubyte"),
        f"{part} labels of MNIST",
        f"IDX, {official} labels, {8 + official} bytes when not gzipped",
    )
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1).long()
    if images.shape[1:] != (28, 28):
        raise damaged(images_path, f"has images of {images.shape[1]}x{images.shape[2]}", "28x28")
    if len(images) != len(labels):
        raise damaged(labels_path, f"has {len(labels)} labels", f"{len(images)}, one for each image of {images_path}")
    check_labels(labels, CLASSES, labels_path)
    return images[:, None], labels


def _names(stem: str, kind: str) -> list[str]:
    return [f"{stem}{dot}{kind}{gz}" for dot in "-." for gz in ("", ".gz")]
