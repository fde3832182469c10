"""Data: from arrays, folders and scikit-learn; rotations, moments, and layers that convert and normalise images."""

import math
import shutil
import struct
import sys
import zlib

import numpy
import pandas
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from partnets.data import Data, Normalise, ToFloat, digits, moments

LABELS = numpy.array([0, 1, 0, 1])


def waves(n=2300, dtype=torch.uint8):
    """Return smooth 9x9 colour images, more than are rotated in one batch."""
    y, x = torch.meshgrid(torch.linspace(0, 1, 9), torch.linspace(0, 1, 9), indexing="ij")
    phase = torch.rand(n, 3, 1, 1) * 6
    images = (torch.sin(2 * x + phase) * torch.cos(y - phase) + 1) / 2
    images = (255 * images).to(torch.uint8) if dtype == torch.uint8 else images
    labels = torch.arange(n) % 7
    return Data("waves", (images, labels), (images[:40], labels[:40]), 7, *moments(images))


def rotated_one_by_one(image, angle):
    """Rotate one image [channels, side, side] with explicit bilinear interpolation."""
    channels, side, _ = image.shape
    padded = F.pad(image.double(), (1, 1, 1, 1))
    centre = (side - 1) / 2
    rows, cols = torch.meshgrid(torch.arange(side) - centre, torch.arange(side) - centre, indexing="ij")
    # A counterclockwise rotation by `angle`; the y axis points downwards.
    from_x = math.cos(angle) * cols - math.sin(angle) * rows + centre
    from_y = math.sin(angle) * cols + math.cos(angle) * rows + centre
    total = torch.zeros(channels, side, side, dtype=torch.float64)
    for dy in (0, 1):
        for dx in (0, 1):
            y, x = from_y.floor() + dy, from_x.floor() + dx
            weight = (1 - (from_y - y).abs()) * (1 - (from_x - x).abs())
            y, x = ((index + 1).clamp(0, side + 1).long() for index in (y, x))
            total += weight * padded[:, y, x]
    return total


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.uint8, 0.51), (torch.float32, 1e-5)])
def test_every_image_is_rotated_by_an_angle_of_its_own(dtype, tolerance):
    whole = waves(dtype=dtype)
    turned = whole.rotated(seed=3)
    generator = torch.Generator().manual_seed(3)
    angles = [(math.pi * (2 * torch.rand(n, generator=generator) - 1)).tolist() for n in (40, 2300)]
    for part, drawn, indices in (("test", angles[0], (0, 39)), ("train", angles[1], (0, 999, 1000, 2299))):
        (x, y), (moved, labels) = getattr(whole, part), getattr(turned, part)
        assert moved.dtype == dtype and moved.shape == x.shape and torch.equal(labels, y)
        for i in indices:
            expected = rotated_one_by_one(x[i], drawn[i])
            torch.testing.assert_close(moved[i].double(), expected, rtol=0, atol=tolerance)
    assert (turned.mean, turned.std, turned.name) == (whole.mean, whole.std, "rotated-waves")
    assert torch.equal(whole.rotated(3).train[0], turned.train[0])
    assert not torch.equal(whole.rotated(4).angles, turned.angles)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_moments_are_those_of_all_pixels_of_a_channel(dtype):
    x = waves(dtype=dtype).train[0]
    units = x.double() / 255 if dtype == torch.uint8 else x.double()
    mean, std = moments(x)
    assert mean == pytest.approx(units.mean((0, 2, 3)).tolist(), rel=1e-9)
    assert std == pytest.approx(units.std((0, 2, 3), correction=0).tolist(), rel=1e-9)
    normalised = Normalise(mean, std)(ToFloat()(x))
    torch.testing.assert_close(normalised.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(normalised.std((0, 2, 3)), torch.ones(3), rtol=0, atol=1e-5)


def test_layers_keep_their_function_with_torch_only():
    x, floats = torch.arange(48, dtype=torch.uint8).view(1, 3, 4, 4), torch.rand(3).double()
    assert ToFloat()(x).flatten().tolist() == (torch.arange(48, dtype=torch.float32) / 255).tolist()
    assert torch.equal(ToFloat()(floats), floats)
    layer = Normalise((0.5, 0.4, 0.1), (0.2, 0.5, 2.0))
    torch.testing.assert_close(ToFloat().to_torch()(x), ToFloat()(x))
    torch.testing.assert_close(layer.to_torch().eval()(ToFloat()(x)), layer(ToFloat()(x)))


def test_digits_are_scikit_learns_split_at_random():
    from sklearn.datasets import load_digits

    originals, targets = load_digits(return_X_y=True)
    whole, again, other = (digits(8, test=297, seed=seed) for seed in (2, 2, 3))
    assert whole.train[0].shape == (1500, 1, 8, 8) and whole.test[0].shape == (297, 1, 8, 8)
    images, labels = (torch.cat(parts) for parts in zip(whole.train, whole.test, strict=True))
    rows = [(*row, label) for row, label in zip((16 * images).flatten(1).int().tolist(), labels.tolist(), strict=True)]
    expected = [(*row, label) for row, label in zip(originals.astype(int).tolist(), targets.tolist(), strict=True)]
    assert sorted(rows) == sorted(expected) and rows != expected and digits().train[0].shape == (1297, 1, 16, 16)
    assert torch.equal(whole.test[1], again.test[1]) and not torch.equal(whole.test[1], other.test[1])


def all_of(data):
    return torch.cat([data.train[0], data.test[0]])


def test_arrays_become_data():
    x, y = numpy.random.default_rng(0).random((20, 5, 5)), numpy.arange(20) % 4
    data = Data.from_arrays((x, y), test=0.25)
    assert data.train[0].shape == (15, 1, 5, 5) and data.train[0].dtype == torch.float32 and data.classes == 4
    expected = torch.tensor(x, dtype=torch.float32).flatten(1).sum(1)
    assert torch.allclose(all_of(data).flatten(1).sum(1).sort().values, expected.sort().values)
    given = Data.from_arrays((x.tolist(), [0, 1, 2, 3] * 5), (torch.zeros(2, 1, 5, 5), [3, 1]), name="mine")
    assert given.classes == 4 and given.test[1].tolist() == [3, 1]
    assert str(given) == "Data(mine: 20 examples to train and 2 to test, [1, 5, 5] of float32, 4 classes)"


def test_data_keep_their_values_when_the_arrays_change():
    train, test = [(numpy.zeros((4, 3), numpy.float32), LABELS.copy()) for _ in range(2)]
    data = Data.from_arrays(train, test)
    for part in (*train, *test):
        part += 1
    assert not any(x.any() or y.tolist() != LABELS.tolist() for x, y in (data.train, data.test))


@pytest.mark.parametrize("value", [0.1, 3.0, -1e6])
def test_a_constant_feature_is_normalised_to_zero(value):
    data = Data.from_arrays((torch.tensor([[0.0, value], [1.0, value]] * 5), [0, 1] * 5))
    normalised = Normalise(data.mean, data.std)(data.train[0])
    assert data.std[1] == 1 and normalised[:, 1].abs().max() < 1e-6 * max(1, abs(value))


@pytest.mark.parametrize(
    "kind",
    [
        lambda x, y: (x[::-1].copy()[::-1], y),
        lambda x, y: (pandas.DataFrame(x), pandas.Series(y)),
        lambda x, y: (x.astype(">f8"), y.astype("uint64")),
        lambda x, y: (numpy.ma.masked_array(x, numpy.zeros_like(x)), torch.as_tensor(y).to(torch.uint16)),
    ],
)
def test_arrays_of_every_kind_are_read(kind):
    x, y = numpy.arange(60.0).reshape(20, 3), numpy.arange(20) % 2
    plain, found = Data.from_arrays((x, y)), Data.from_arrays(kind(x, y))
    assert torch.equal(found.train[0], plain.train[0]) and torch.equal(found.train[1], plain.train[1])


ARRAYS = [
    ((numpy.zeros((4, 3), complex), LABELS), {}, TypeError, "train has complex numbers; pass real ones"),
    (
        (numpy.arange(4)[:, None] + 1_700_000_000, LABELS),
        {},
        ValueError,
        "feature 0 of train is the same .* in float32",
    ),
    ((numpy.zeros((4, 0)), LABELS), {}, ValueError, r"x of shape \[4, 0\]"),
    (
        (numpy.zeros((4, 3), numpy.uint8), LABELS),
        {"test": (numpy.zeros((2, 3)), LABELS[:2])},
        TypeError,
        "are uint8 and float32, which are scaled differently",
    ),
    ((numpy.zeros((4, 3)), LABELS / 2), {}, TypeError, "labels of float64; pass whole numbers"),
    ((numpy.zeros((4, 3)), LABELS - 1), {}, ValueError, "negative label"),
    ((numpy.zeros((4, 3)), LABELS[:3]), {}, ValueError, r"y of \[3\]"),
    ((numpy.full((4, 3), numpy.nan), LABELS), {}, ValueError, "NaN or infinite"),
    ((numpy.zeros((4, 32, 32, 3), numpy.uint8), LABELS), {}, ValueError, r"channels last; pass x\.transpose"),
    ((numpy.zeros((4, 8, 8), int), LABELS), {}, TypeError, "images of int64; pass uint8"),
    (numpy.zeros((4, 3)), {}, TypeError, r"train is a ndarray; pass \(x, y\)"),
    ((numpy.full((4, 1, 8, 8), 200.0), LABELS), {}, ValueError, r"from 200 to 200; pass uint8 in 0\.\.255, or floats"),
    ((numpy.full((4, 1, 8, 8), -0.5), LABELS), {}, ValueError, r"from -0\.5 to -0\.5; .*data\.Normalise"),
    ((numpy.ma.masked_equal(numpy.zeros((4, 3)), 0), LABELS), {}, ValueError, r"12 masked entries; pass x\.filled"),
    ((numpy.zeros((4, 3)), LABELS + 10**6), {}, ValueError, "the label 0, but labels go to 1000001; .*return_inverse"),
    (
        (numpy.zeros((6, 3)), [0, 0, 0, 2, 2, 2]),
        {},
        ValueError,
        "the label 1, but labels go to 2; pass labels without gaps",
    ),
    (
        (numpy.zeros((4, 3)), LABELS),
        {"test": (numpy.zeros((1, 3)), [2])},
        ValueError,
        "the label 2, but labels go to 2",
    ),
    ((numpy.zeros((4, 3)), list("abab")), {}, TypeError, "an array of <U1; pass numbers"),
    ((torch.eye(4).to_sparse(), LABELS), {}, TypeError, "layout torch.sparse_coo; pass dense"),
    ((numpy.zeros((4, 3)), LABELS), {"test": 0.0}, ValueError, r"test=0\.0; pass a share"),
    ((numpy.zeros((4, 3)), LABELS), {"test": 0.01}, ValueError, r"test=0\.01 of 4 examples leaves none"),
    ((numpy.zeros((4, 3)), numpy.arange(4)), {}, ValueError, "each class has a single example"),
    ((numpy.zeros((4, 3)), LABELS), {"test": (numpy.zeros((2, 5)), LABELS[:2])}, ValueError, "of one shape"),
]


@pytest.mark.parametrize(("pair", "options", "error", "message"), ARRAYS)
def test_arrays_that_do_not_fit_are_refused(pair, options, error, message):
    with pytest.raises(error, match=message):
        Data.from_arrays(pair, **options)


NUMBERS = Data("numbers", *[(torch.arange(40.0)[:, None], torch.arange(40))] * 2, 40, (0.0,), (1.0,))


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda: ToFloat()(torch.arange(3)), AssertionError, "uint8"),
        (lambda: Normalise((0.5,), (0.5, 0.5)), ValueError, "1 means and 2 stds"),
        (lambda: Normalise((0.5,), (0.0,)), ValueError, "positive"),
        (lambda: Normalise((0.5,), (0.5,))(torch.zeros(1, 3, 2, 2)), AssertionError, "of channels"),
        (lambda: Normalise((0.5,), (0.5,))(torch.zeros(1, 1, 2, 2, dtype=torch.uint8)), AssertionError, "ToFloat"),
        (lambda: NUMBERS.rotated(), ValueError, r"\[40, 1\]; only images"),
        (lambda: waves(9).rotated(-1), ValueError, "seed=-1"),
        (lambda: digits(0), ValueError, "size=0"),
        (lambda: digits(test=1797), ValueError, r"1\.\.1796"),
    ],
)
def test_wrong_calls_are_named(use, error, message):
    with pytest.raises(error, match=message):
        use()


def test_a_missing_library_is_named_with_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match="pip install scikit-learn"):
        digits()


def folder_of(root, parts=("",), kinds=("cat", "dog"), mode="RGB"):
    for part in parts:
        for label, kind in enumerate(kinds):
            (root / part / kind).mkdir(parents=True)
            for i in range(5):
                image = Image.new(mode, (9, 6), 100 * label + i if mode == "L" else (100 * label + i, 0, 0))
                image.save(root / part / kind / f"{i}.png")
    return root


def test_a_folder_is_split_by_class_and_seed(tmp_path):
    root = folder_of(tmp_path / "pets")
    data, again, other = (Data.from_folder(root, 4, seed=seed) for seed in (1, 1, 2))
    assert (data.name, data.classes) == ("pets", 2) and data.test[1].tolist() == [0, 1]
    for x, y in (data.train, data.test):
        assert x.dtype == torch.uint8 and x.shape[1:] == (3, 4, 4) and torch.equal(x[:, 0, 0, 0] >= 100, y == 1)
    seen = torch.cat([data.train[0], data.test[0]])[:, 0, 0, 0]
    assert sorted(seen.tolist()) == [*range(5), *range(100, 105)]
    assert torch.equal(data.test[0], again.test[0]) and not torch.equal(data.test[0], other.test[0])


def test_folders_train_and_test_stay_apart(tmp_path):
    root = folder_of(tmp_path, ("train", "test"), mode="L")
    shutil.rmtree(root / "test" / "cat")
    (root / "test" / "cat").mkdir()
    Image.new("RGB", (30, 10), (7, 8, 9)).save(root / "test" / "cat" / "wide.png")
    data = Data.from_folder(root, (4, 5))
    assert data.train[0].shape == (10, 3, 4, 5) and data.test[1].tolist() == [0, 1, 1, 1, 1, 1]
    assert data.test[0][0, :, 0, 0].tolist() == [7, 8, 9]


def test_hidden_files_and_folders_are_no_classes_and_no_images(tmp_path):
    root = folder_of(tmp_path, kinds=("cat", "dog", ".ipynb_checkpoints", "dog/.thumbnails"))
    shutil.copy(root / "dog" / "0.png", root / "dog" / "._0.png")
    data = Data.from_folder(root, 4)
    assert data.classes == 2 and len(all_of(data)) == 10


def test_a_test_folder_of_another_name_is_given(tmp_path):
    root = folder_of(tmp_path, ("train", "val"))
    data = Data.from_folder(root / "train", 4, test=root / "val")
    assert (data.name, len(data.train[0]), len(data.test[0]), data.classes) == ("train", 10, 10, 2)


def test_damaged_exif_data_leave_an_image_as_it_is(tmp_path):
    root = folder_of(tmp_path)
    Image.new("RGB", (4, 4), (9, 0, 0)).save(root / "cat" / "3.png", exif=b"Exif\0\0garbage!")
    assert len(all_of(Data.from_folder(root, 4))) == 10


def deep_colours(root):
    """Write a PNG of 16 bits a channel, which Pillow reads but does not write."""

    def part(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = zlib.compress(b"".join(b"\0" + b"\xff\x0f" * 12 for _ in range(4)))
    header = part(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 16, 2, 0, 0, 0))
    content = b"\x89PNG\r\n\x1a\n" + header + part(b"IDAT", rows) + part(b"IEND", b"")
    (root / "cat" / "3.png").write_bytes(content)


def parts_of_another_name(root):
    for folder in ("cat", "dog"):
        shutil.rmtree(root / folder)
    folder_of(root, ("seg_train", "seg_test"))


def deep(root):
    Image.fromarray(numpy.full((6, 9), 40000, numpy.uint16)).save(root / "cat" / "3.png")


def truncated(root):
    path = root / "cat" / "3.png"
    numpy.random.seed(0)
    Image.fromarray(numpy.random.randint(0, 255, (60, 60, 3), numpy.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:5000])


def other_classes(root):
    shutil.rmtree(root / "cat")
    shutil.rmtree(root / "dog")
    folder_of(root, ("train",))
    folder_of(root, ("test",), ("cat", "owl"))


@pytest.mark.parametrize(
    ("spoil", "size", "error", "message"),
    [
        (deep_colours, 4, ValueError, r"3\.png has more than 8 bits a channel"),
        (parts_of_another_name, 4, ValueError, "seg_train and seg_test, which have the same subfolders"),
        (deep, 4, ValueError, r"3\.png has more than 8 bits a channel .*; convert it"),
        (lambda root: (root / "cat" / "3.png").write_bytes(b"no image"), 4, OSError, r"3\.png"),
        (lambda root: (root / "owl").mkdir(), 4, FileNotFoundError, "owl"),
        (other_classes, 4, ValueError, "classes .*'dog'.* to train and .*'owl'.* to test"),
        (shutil.rmtree, 4, FileNotFoundError, "pets"),
        (
            lambda root: folder_of(root, ("training", "Val")),
            4,
            ValueError,
            "training and val, which have the same subfolders .*test=",
        ),
        (
            lambda root: folder_of(root, ("train", "test")),
            4,
            ValueError,
            "pets has train and test, which have the same",
        ),
        (lambda root: shutil.rmtree(root / "dog"), 4, ValueError, "only one class, cat"),
        (truncated, 4, OSError, r"3\.png cannot be read"),
        (lambda root: None, (4, 0), ValueError, "width=0"),
        (lambda root: None, (4, 4, 4), ValueError, r"height=\(4, 4, 4\)"),
        (lambda root: None, 32.0, ValueError, r"height=32\.0; pass an int"),
    ],
)
def test_folders_that_cannot_be_read_are_refused(tmp_path, spoil, size, error, message):
    spoil(folder_of(tmp_path / "pets"))
    with pytest.raises(error, match=message):
        Data.from_folder(tmp_path / "pets", size)


def test_the_share_to_test_is_checked_before_images_are_read(tmp_path):
    root = folder_of(tmp_path)
    (root / "cat" / "3.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="test=1; pass a share"):
        Data.from_folder(root, 4, test=1)


def test_a_folder_is_not_its_own_test_set(tmp_path):
    root = folder_of(tmp_path)
    with pytest.raises(ValueError, match="root and test are the same folder"):
        Data.from_folder(root, 4, test=root / ".." / root.name)
