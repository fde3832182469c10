"""CIFAR-10: 32x32 colour images, from its binary or its Python version."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from partnets.data.array_pickle import Array, read_pickle
from partnets.data.dataset import Data
from partnets.data.files import check_labels, damaged, find

CLASSES = 10
PIXELS = 3 * 32 * 32
TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
FIRST = (
    "data_batch_1.bin",
    "cifar-10-batches-bin/data_batch_1.bin",
    "data_batch_1",
    "cifar-10-batches-py/data_batch_1",
)
# Rounded as in published code for the rotated data sets.
MEAN = (125.3 / 255, 123.0 / 255, 113.9 / 255)
STD = (63.0 / 255, 62.1 / 255, 66.7 / 255)
BINARY = f"records of 1 byte of label and {PIXELS} of pixels, officially 10000"
PICKLE = f"a pickle of b'data', uint8 [n, {PIXELS}], and b'labels', a list of n, with n officially 10000"


def cifar10(root: str | PathLike) -> Data:
    """Reads CIFAR-10 (Krizhevsky 2009): 50000 training and 10000 test images.

    Args:
        root: the folder of the files of cifar-10-binary.tar.gz (data_batch_1.bin to data_batch_5.bin and
            test_batch.bin) or of cifar-10-python.tar.gz (the same names without .bin), or the folder in which either
            was unpacked (that of cifar-10-batches-bin or cifar-10-batches-py). The pickles of the Python version are
            read without running anything in them.

    Returns:
        Images uint8 [n, 3, 32, 32], red, green and blue; as many as the files hold. mean and std are the constants of
        published code.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for name in (*TRAIN, "test_batch"):
        ...         _ = Path(root, f"{name}.bin").write_bytes(bytes([7]) + bytes(PIXELS))
        ...     cifar10(root)
        Data(cifar10: 5 examples to train and 1 to test, [3, 32, 32] of uint8, 10 classes)
    """
    first = find(root, FIRST, "training images of CIFAR-10", f"{BINARY} (.bin), or {PICKLE}")
    read, content = (_read_binary, BINARY) if first.suffix else (_read_pickle, PICKLE)
    paths = [
        find(first.parent, [name + first.suffix], f"{name} of CIFAR-10", content) for name in (*TRAIN, "test_batch")
    ]
    *train, test = map(read, paths)
    counts = [len(labels) for _, labels in train]
    if min(counts) < max(counts):
        least = paths[counts.index(min(counts))]
        raise damaged(least, f"has {min(counts)} images", f"{max(counts)}, as others of the five have")
    images, labels = (torch.cat(parts) for parts in zip(*train, strict=True))
    return Data("cifar10", (images, labels), test, CLASSES, MEAN, STD)


def _read_binary(path: Path) -> tuple[Tensor, Tensor]:
    content = path.read_bytes()
    if not content or len(content) % (1 + PIXELS):
        raise damaged(path, f"has {len(content)} bytes", f"a multiple of {1 + PIXELS}: {BINARY}")
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, 1 + PIXELS)
    labels = records[:, 0].long()
    check_labels(labels, CLASSES, path)
    return records[:, 1:].reshape(-1, 3, 32, 32), labels


def _read_pickle(path: Path) -> tuple[Tensor, Tensor]:
    batch = read_pickle(path, PICKLE)
    images, labels = (batch.get(key) if isinstance(batch, dict) else None for key in (b"data", b"labels"))
    images = images.tensor if isinstance(images, Array) else None
    if images is None or images.shape[1:] != (PIXELS,):
        raise damaged(path, "has no array of images", PICKLE)
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < CLASSES for label in labels):
        raise damaged(path, f"has no list of labels in 0..{CLASSES - 1}", PICKLE)
    if len(labels) != len(images):
        raise damaged(path, f"has {len(images)} images and {len(labels)} labels", PICKLE)
    return images.reshape(-1, 3, 32, 32), torch.tensor(labels, device="cpu")
