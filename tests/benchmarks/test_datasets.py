"""MNIST, CIFAR-10 and Tiny ImageNet: files give the right tensors, errors name damaged files, and no downloads."""

import gzip
import socket

import image_files
import pytest
import torch
from image_files import FOLDERS, colour, idx, save

from partbench.datasets import load, subset
from partnets.data import Data, digits


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def opened(*_, **__):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", opened)


@pytest.mark.parametrize("folder", [None, "."], ids=["official", "flat"])
@pytest.mark.parametrize("name", FOLDERS)
def test_official_files_are_read(name, folder, tmp_path, monkeypatch):
    parts = image_files.write(name, tmp_path, monkeypatch, folder)
    monkeypatch.setenv("PARTNETS_DATA", str(tmp_path))
    data = load(name)
    assert data.name == name and data.classes == (3 if name == "tiny-imagenet" else 10)
    for (x, y), (images, labels) in zip((data.train, data.test), parts, strict=True):
        assert x.dtype == torch.uint8 and y.dtype == torch.int64 and torch.equal(y, labels) and x.is_contiguous()
        if name == "tiny-imagenet":  # JPEG preserves a uniform colour up to a few levels
            assert x.shape[1:] == (3, 64, 64) and (x.int() - images[:, :, None, None]).abs().max() <= 4
        else:
            assert torch.equal(x, images)


def test_cifar10_is_read_from_folders_of_images(tmp_path):
    for part in ("train", "test"):
        for label in range(10):
            path = tmp_path / "cifar10" / part / f"class-{label}" / "0.png"
            save(path, colour(label % 3, 0), (32, 32), kind="PNG")
    data = load("cifar10", tmp_path)
    assert data.train[0].shape == (10, 3, 32, 32) and data.test[1].tolist() == list(range(10))
    assert data.test[0][4, :, 0, 0].tolist() == list(colour(1, 0))


GOOD = idx(torch.zeros(5, 28, 28))
DAMAGES = [
    ("mnist", "train-images-idx3-ubyte", None, "there is no .*train-images-idx3-ubyte; expected an official file"),
    ("mnist", "t10k-images-idx3-ubyte", b"", r"t10k-images.* begins with the bytes \[\]"),
    ("mnist", "t10k-images-idx3-ubyte", GOOD[:-1], "t10k-images.* bytes for 5 x 28 x 28"),
    ("mnist", "t10k-images-idx3-ubyte", gzip.compress(GOOD, mtime=0), r"begins with the bytes \[31, 139"),
    ("mnist", "train-labels-idx1-ubyte", idx(torch.zeros(39)), "train-.* has 39 labels up to 0 for images"),
    ("mnist", "train-labels-idx1-ubyte", idx(torch.full((40,), 10)), "has 40 labels up to 10"),
    ("cifar10", "data_batch_1", None, r"expected a file of cifar-10-python\.tar\.gz"),
    ("cifar10", "data_batch_4", b"c__builtin__\nexit\n(tR.", "data_batch_4 has another MD5"),  # is not unpickled
    ("tiny-imagenet", "val/val_annotations.txt", None, "val_annotations.txt; expected lines"),
    ("tiny-imagenet", "val/images/val_2.JPEG", None, "val_2.JPEG; expected an image"),
    ("tiny-imagenet", "wnids.txt", b"n01\nn02\nn01\n", "wnids.txt has 3 lines, 2 distinct"),
    ("tiny-imagenet", "wnids.txt", b"n01\nn02\nn09\n", "train/n09/images"),
    ("tiny-imagenet", "val/val_annotations.txt", b"val_0.JPEG\tn99\n", "'val_0.JPEG.tn99' as line 1"),
    ("tiny-imagenet", "val/val_annotations.txt", b"val_0.JPEG\tn01\n", "has 1 lines.*each of the 3 images"),
    ("tiny-imagenet", "train/n03/images/n03_1.JPEG", b"no image", "n03_1.JPEG cannot be decoded"),
]


@pytest.mark.parametrize(("name", "file", "content", "message"), DAMAGES)
def test_a_file_that_is_missing_or_damaged_is_named(name, file, content, message, tmp_path, monkeypatch):
    image_files.write(name, tmp_path, monkeypatch, ".")
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(FileNotFoundError if content is None or "n09" in message else ValueError, match=message):
        load(name, tmp_path)


def test_names_roots_and_rotations():
    assert torch.equal(load("digits", rotated=True, seed=5).test[0], digits(seed=5).rotated(5).test[0])
    with pytest.raises(ValueError, match="'svhn'; pass one of digits, mnist, cifar10, tiny-imagenet"):
        load("svhn")
    with pytest.raises(FileNotFoundError, match="there is no here/"):
        load("mnist", "here")


def test_smaller_subsets_lie_in_larger_ones_and_keep_their_labels():
    whole = Data("numbers", *[(torch.arange(100.0)[:, None], torch.arange(100))] * 2, 100, (0.0,), (1.0,))
    subsets = [subset(whole, n, seed=4).train for n in (1, 10, 60, 100)]
    assert all(torch.equal(x[:, 0].long(), y) for x, y in subsets)
    chosen = [set(y.tolist()) for _, y in subsets]
    assert chosen[0] < chosen[1] < chosen[2] < chosen[3] == set(range(100))
    with pytest.raises(ValueError, match=r"1\.\.100"):
        subset(whole, 101)
