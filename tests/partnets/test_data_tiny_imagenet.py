"""Tiny ImageNet: folders of JPEGs become tensors with the right labels, and every damage is told."""

import sys

import pytest
import torch
from PIL import Image

from partnets.data import load, tiny_imagenet

WNIDS = ("n02", "n01", "n03")  # not sorted, as in the official wnids.txt
VALIDATION = (("val_0.JPEG", 1), ("val_1.JPEG", 0), ("val_2.JPEG", 1), ("val_10.JPEG", 2))


def colour(label, i):
    """JPEG keeps an even colour to within a few steps."""
    return (60 * label + 20, 200 - 50 * i, 30 * i + 10 * label)


def save(path, pixel, size=(64, 64), mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, pixel).save(path, "JPEG", quality=95, **options)


@pytest.fixture
def root(tmp_path):
    """Two images of each class to train, four to test."""
    (tmp_path / "wnids.txt").write_text("".join(f"{wnid}\n" for wnid in WNIDS))
    for label, wnid in enumerate(WNIDS):
        for i in range(2):
            save(tmp_path / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", colour(label, i))
        (tmp_path / "train" / wnid / f"{wnid}_boxes.txt").write_text("boxes")
    for i, (name, label) in enumerate(VALIDATION):
        save(tmp_path / "val" / "images" / name, colour(label, i))
    lines = [f"{name}\t{WNIDS[label]}\t0\t32\t44\t62\n" for name, label in VALIDATION]
    (tmp_path / "val" / "val_annotations.txt").write_text("".join(lines))
    return tmp_path


def assert_colours(x, expected):
    expected = torch.tensor(expected)[:, :, None, None].expand(-1, -1, 64, 64)
    torch.testing.assert_close(x.int(), expected.int(), rtol=0, atol=4)


@pytest.mark.parametrize("above", [False, True])
def test_folders_of_images_become_tensors(above, root):
    if above:
        (root / "wnids.txt").parent.rename(root.parent / "tiny-imagenet-200")
    data = tiny_imagenet(root.parent if above else root)
    x, y = data.train
    assert x.dtype == torch.uint8 and x.shape == (6, 3, 64, 64) and y.tolist() == [0, 0, 1, 1, 2, 2]
    assert_colours(x, [colour(label, i) for label in range(3) for i in range(2)])
    x, y = data.test
    assert y.tolist() == [1, 0, 1, 2] and y.dtype == torch.int64
    assert_colours(x, [colour(label, i) for i, (_, label) in enumerate(VALIDATION)])
    assert (data.name, data.classes) == ("tiny-imagenet", 3)
    assert data.mean == pytest.approx((data.train[0].double() / 255).mean((0, 2, 3)).tolist())
    if not above:
        assert torch.equal(load("tiny-imagenet", root).train[0], data.train[0])


def test_rows_are_rows_and_columns_are_columns(root):
    picture = Image.new("RGB", (64, 64), (0, 0, 0))
    picture.paste((250, 250, 250), (0, 0, 64, 16))  # the top quarter
    picture.save(root / "val" / "images" / "val_0.JPEG", quality=95)
    x = tiny_imagenet(root).test[0][0]
    assert (x[:, :15] > 200).all() and (x[:, 17:] < 50).all()


def test_grey_images_become_colour(root):
    save(root / "train" / "n01" / "images" / "n01_0.JPEG", 120, mode="L")
    x = tiny_imagenet(root).train[0][2]
    assert (x[0] == x[1]).all() and (x[1] == x[2]).all() and (x.int() - 120).abs().max() <= 2


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (
            "wnids.txt",
            "tiny-imagenet-200/wnids.txt; expected a WordNet id a line, officially 200. Nothing is downloaded",
        ),
        ("val/val_annotations.txt", "no labels of Tiny ImageNet's validation set: looked for .*val_annotations.txt"),
        ("val/images/val_2.JPEG", "no validation image val_2.JPEG"),
        ("train/n01", r"no training images of Tiny ImageNet's class n01: looked for .*\*.JPEG"),
    ],
)
def test_what_is_missing_is_named_before_anything_is_decoded(missing, message, root, monkeypatch):
    (root / missing).rename(root / "away")
    monkeypatch.setattr(Image, "open", None)
    with pytest.raises(FileNotFoundError, match=message):
        tiny_imagenet(root)


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("wnids.txt", "", "has 0 lines"),
        ("wnids.txt", "n01\nn02\nn01\n", "has 3 lines, 2 distinct"),
        ("val/val_annotations.txt", "", "has 0 lines"),
        ("val/val_annotations.txt", "val_0.JPEG\tn01\nval_1.JPEG\tn02\n", "has 2 lines.*one for each of the 4 images"),
        ("val/val_annotations.txt", "val_0.JPEG\tn01\nval_1.JPEG\tn99\n", r"'val_1.JPEG\\tn99' as line 2"),
        ("val/val_annotations.txt", "val_0.JPEG n01\n", "as line 1"),
    ],
)
def test_damaged_lists_raise(path, text, message, root):
    (root / path).write_text(text)
    with pytest.raises(ValueError, match=f"{message}.*Copy it anew"):
        tiny_imagenet(root)


def test_damaged_images_raise(root):
    path = root / "train" / "n03" / "images" / "n03_1.JPEG"
    whole = path.read_bytes()
    for damage in (b"", b"no image", whole[: len(whole) // 2]):
        path.write_bytes(damage)
        with pytest.raises(ValueError, match=r"n03_1.JPEG cannot be decoded .*expected one of JPEG images of 64x64"):
            tiny_imagenet(root)
    Image.new("RGB", (64, 64)).save(path, "PNG")
    with pytest.raises(ValueError, match="cannot be decoded"):
        tiny_imagenet(root)
    save(path, (0, 0, 0), size=(64, 32))
    with pytest.raises(ValueError, match="is an image of 64x32"):
        tiny_imagenet(root)


def test_without_pillow_the_cure_is_named(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install partkernels\[data\]"):
        tiny_imagenet(root)
