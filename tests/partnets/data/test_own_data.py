"""Data.from_folder and Data.from_arrays convert a user's data to Data, or raise with the necessary change."""

import re
import shutil

import numpy
import pytest
import torch
from PIL import Image

import partnets
from partnets.data import Data


def write(path, colour=(10, 20, 30), size=(6, 4), mode="RGB", **options):
    """Write an image of one colour and return its path; size is (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path, **options)
    return path


def of_two_classes(root, **options):
    for i in range(5):
        for kind in ("cat", "dog"):
            write(root / kind / f"{i}.png", **options)
    return root


def test_a_folder_of_classes_is_split_by_class_and_seed(tmp_path):
    for i in range(10):
        write(tmp_path / "own/zebra" / f"{i}.png", (i, 0, 0))
        write(tmp_path / "own/ape" / f"{i}.png", (100 + i, 0, 0))
    data, again, other = (Data.from_folder(tmp_path / "own", test=0.3, seed=seed) for seed in (1, 1, 2))
    assert data.names == ("ape", "zebra") and data.classes == 2 and data.name == "own"
    for x, y in (data.train, data.test):
        assert ((x[:, 0, 0, 0] >= 100) == (y == 0)).all() and x.shape[1:] == (3, 4, 6) and x.dtype == torch.uint8
    assert data.test[1].bincount().tolist() == [3, 3]
    seen = torch.cat([data.train[0], data.test[0]])[:, 0, 0, 0]
    assert sorted(seen.tolist()) == [*range(10), *range(100, 110)]
    assert torch.equal(data.test[0], again.test[0]) and not torch.equal(data.test[0], other.test[0])
    assert data.mean == pytest.approx((data.train[0][:, 0].float().mean().item() / 255, 0, 0))


def test_images_to_validate_are_trained_on(tmp_path):
    for part in ("train", "test", "val"):
        of_two_classes(tmp_path / part, colour=(len(part), 0, 0))
    data = Data.from_folder(tmp_path)
    assert data.train[0].shape[0] == 20 and data.train[0].unique().tolist() == [0, 3, 5]
    assert data.test[0].unique().tolist() == [0, 4]


def test_all_formats_of_images_are_read(tmp_path):
    of_two_classes(tmp_path)
    for name, format in (("a.gif", "GIF"), ("b.JFIF", "JPEG"), ("c.webp", "WEBP"), ("d.tiff", "TIFF")):
        Image.new("RGB", (6, 4)).save(tmp_path / "cat" / name, format=format)
    (tmp_path / "cat" / "notes.pdf").write_bytes(b"no image")
    data = Data.from_folder(tmp_path)
    assert len(data.train[1]) + len(data.test[1]) == 14


@pytest.mark.parametrize("test", ["test", "val", "valid", "validation"])
def test_a_folder_that_is_split_stays_so(tmp_path, test):
    of_two_classes(tmp_path / "train")
    write(tmp_path / test / "dog" / "0.png", (9, 9, 9))
    data = Data.from_folder(tmp_path)
    assert data.train[1].tolist() == [0] * 5 + [1] * 5 and data.test[1].tolist() == [1]
    assert data.test[0].unique().tolist() == [9]


def test_folders_of_a_split_do_not_pass_as_classes(tmp_path):
    of_two_classes(tmp_path / "train")
    assert Data.from_folder(tmp_path).names == ("cat", "dog")
    of_two_classes(tmp_path / "first")
    (tmp_path / "train").rename(tmp_path / "second")
    with pytest.raises(ValueError, match="first has folders and no images; pass a folder with a folder of images"):
        Data.from_folder(tmp_path)
    for kind in ("ape", "owl"):  # as in Tiny ImageNet
        write(tmp_path / "nested" / kind / "images" / "0.png")
        write(tmp_path / "nested" / kind / "images" / "1.png")
    assert Data.from_folder(tmp_path / "nested", test=0.5).names == ("ape", "owl")


def test_hidden_files_and_folders_are_left_out(tmp_path):
    of_two_classes(tmp_path)
    for path in (".ipynb_checkpoints/0.png", "cat/.ipynb_checkpoints/1.png", "cat/.2.png"):
        write(tmp_path / path)
    (tmp_path / "dog" / "._0.png").write_bytes(b"no image")
    data = Data.from_folder(tmp_path)
    assert data.names == ("cat", "dog") and len(data.train[1]) + len(data.test[1]) == 10


def test_images_are_scaled_and_cropped_to_a_size(tmp_path):
    of_two_classes(tmp_path)
    image = Image.new("RGB", (30, 10))
    image.paste((255, 255, 255), (10, 0, 20, 10))  # the middle third is white
    image.save(tmp_path / "cat" / "0.png")
    with pytest.raises(ValueError, match=r"png is an image of \d+x\d+, and .* of .*; pass size="):
        write(tmp_path / "dog" / "1.png", size=(6, 5))
        Data.from_folder(tmp_path)
    data = Data.from_folder(tmp_path, size=5, test=0.5)
    images = torch.cat([data.train[0], data.test[0]])
    assert images.shape == (10, 3, 5, 5) and (images > 200).flatten(1).all(1).sum() == 1
    assert Data.from_folder(tmp_path, size=(2, 7)).train[0].shape[2:] == (2, 7)
    for size in (0, True, 2.5, "5", (5,), (5, 0)):
        with pytest.raises(ValueError, match=re.escape(f"size={size!r}; pass a positive int, or height and width")):
            Data.from_folder(tmp_path, size=size)


def test_grey_images_have_one_channel_if_all_are_grey(tmp_path):
    of_two_classes(tmp_path, mode="L", colour=7)
    assert Data.from_folder(tmp_path).train[0].shape == (8, 1, 4, 6)
    write(tmp_path / "cat" / "9.png")
    assert Data.from_folder(tmp_path).train[0].shape[1] == 3


def test_images_are_upright_as_viewers_show_them(tmp_path):
    of_two_classes(tmp_path, mode="L", colour=7, size=(4, 6))
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: rotated by 90 degrees
    turned = Image.new("L", (6, 4))
    turned.putpixel((0, 0), 255)
    turned.save(tmp_path / "cat" / "0.png", exif=exif)
    data = Data.from_folder(tmp_path)
    images = torch.cat([data.train[0], data.test[0]])
    found = images[(images == 255).flatten(1).any(1)]
    assert found.shape == (1, 1, 6, 4) and found[0, 0, 0, 3] == 255


def _damage(root):
    (root / "cat" / "3.png").write_bytes(b"no image")


def _cut(root):
    path = root / "cat" / "3.png"
    Image.fromarray(numpy.random.default_rng(0).integers(0, 256, (4, 6, 3), numpy.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:70])


def _deep(root):
    Image.fromarray(numpy.full((4, 6), 40000, numpy.uint16)).save(root / "cat" / "3.png")


def _empty(root):
    (root / "owl").mkdir()


def _unknown(root):
    of_two_classes(root / "train")
    write(root / "test" / "owl" / "0.png")


def _loop(root):
    (root / "cat" / "again").symlink_to(root / "cat", target_is_directory=True)


def _leak(root):
    of_two_classes(root / "train")
    (root / "test" / "cat").mkdir(parents=True)
    (root / "test" / "cat" / "0.png").symlink_to(root / "train" / "cat" / "3.png")


def _parts(root):
    for part in ("Training", "Testing"):
        write(root / part / "cat" / "0.png")
    for kind in ("cat", "dog"):
        shutil.rmtree(root / kind)


def _unreadable(root):
    (root / "cat" / "3.HEIC").write_bytes(b"no image")


def _single(root):
    for path in root.glob("*/[1-9].png"):
        path.unlink()


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (_damage, ValueError, r"3\.png cannot be decoded"),
        (_cut, ValueError, r"3\.png cannot be decoded"),
        (_deep, ValueError, r"3\.png has more than 8 bits a channel .*; convert it"),
        (_empty, FileNotFoundError, "owl"),
        (_unknown, ValueError, "test has the classes owl, and .*train does not"),
        (_loop, ValueError, r"cat.*\.png are one file"),
        (_leak, ValueError, r"3\.png and .*0\.png are one file"),
        (_parts, ValueError, "has the folders Testing, Training; name them train and test"),
        (_unreadable, ValueError, r"3\.HEIC cannot be decoded .*; convert"),
        (_single, ValueError, "each class has a single example"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, spoil, error, message):
    spoil(of_two_classes(tmp_path))
    with pytest.raises(error, match=message):
        Data.from_folder(tmp_path)


def test_folders_that_are_missing_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"there is no folder {re.escape(str(tmp_path / 'none'))}"):
        Data.from_folder(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="has no folders; pass a folder with a folder of images for each class"):
        Data.from_folder(tmp_path)
    of_two_classes(tmp_path)
    for test in (1.5, 0, True, "0.2"):
        with pytest.raises(ValueError, match=re.escape(f"test={test!r}; pass a share")):
            Data.from_folder(tmp_path, test=test)
    assert len(Data.from_folder(tmp_path, test=numpy.float32(0.2)).test[1]) == 2
    with pytest.raises(TypeError, match="root is of type int"):
        Data.from_folder(3)


def test_images_of_a_folder_train_a_network(tmp_path):
    data = Data.from_folder(of_two_classes(tmp_path), test=0.4)
    network = torch.nn.Sequential(
        partnets.data.ToFloat(),
        partnets.data.Normalise(data.mean, (1, 1, 1)),
        torch.nn.Flatten(),
        torch.nn.Linear(72, 2),
    )
    result = partnets.tune(network, data, "weight_decay", steps=3, batch_size=8)
    assert result.model(data.test[0]).shape == (4, 2)


def test_arrays_become_data():
    x, y = numpy.random.default_rng(0).random((20, 5, 5)), numpy.arange(20) % 4
    data = Data.from_arrays((x, y), test=0.25)
    assert data.train[0].shape == (15, 1, 5, 5) and data.train[0].dtype == torch.float32 and data.classes == 4
    joined = torch.cat([data.train[0], data.test[0]]).flatten(1).sum(1).sort().values
    assert torch.allclose(joined, torch.tensor(x, dtype=torch.float32).flatten(1).sum(1).sort().values)
    given = Data.from_arrays((x.tolist(), [0, 5] * 10), (torch.zeros(2, 1, 5, 5), [5, 7]), name="mine")
    assert given.classes == 8 and given.test[1].tolist() == [5, 7] and given.name == "mine"
    assert given.rotated().subset(4).train[0].shape == (4, 1, 5, 5)
    assert Data.from_arrays((numpy.zeros((8, 3), int), numpy.array([True, False] * 4))).train[0].dtype == torch.float32


def test_arrays_may_be_flipped_frozen_or_of_pandas():
    pandas = pytest.importorskip("pandas")
    x, y = numpy.arange(60.0).reshape(20, 3), numpy.arange(20) % 2
    y.flags.writeable = False
    plain = Data.from_arrays((x, y))
    swapped, unsigned = x.astype(">f8"), y.astype("uint64")
    masked = numpy.ma.masked_array(x, numpy.zeros_like(x))
    assert torch.equal(Data.from_arrays((x, torch.as_tensor(y.copy()).to(torch.uint16))).train[1], plain.train[1])
    for pair in ((x[::-1].copy()[::-1], y), (pandas.DataFrame(x), pandas.Series(y)), (swapped, unsigned), (masked, y)):
        assert torch.equal(Data.from_arrays(pair).train[0], plain.train[0])
    with pytest.raises(TypeError, match="an array of <U1; pass numbers"):
        Data.from_arrays((x, numpy.array(["a", "b"] * 10)))


LABELS = numpy.zeros(4, dtype=int)


@pytest.mark.parametrize(
    ("pair", "options", "error", "message"),
    [
        ((numpy.zeros((4, 3)), numpy.zeros(4)), {}, TypeError, "labels of float64; pass whole numbers"),
        ((numpy.zeros((4, 3)), LABELS - 1), {}, ValueError, "negative label"),
        ((numpy.zeros((4, 3)), LABELS[:3]), {}, ValueError, r"x of shape \[4, 3\] and y of \[3\]"),
        ((numpy.zeros((4, 3)), LABELS[:, None]), {}, ValueError, r"y of \[4, 1\]"),
        ((numpy.zeros((0, 3)), LABELS[:0]), {}, ValueError, r"x of shape \[0, 3\]"),
        ((numpy.full((4, 3), numpy.nan), LABELS), {}, ValueError, "NaN or infinite"),
        ((numpy.zeros((4, 32, 32, 3), numpy.uint8), LABELS), {}, ValueError, r"channels last; pass x\.transpose"),
        ((numpy.zeros((4, 8, 8), int), LABELS), {}, TypeError, r"images of int64; pass uint8"),
        (numpy.zeros((4, 3)), {}, TypeError, r"train is a ndarray; pass \(x, y\)"),
        ((numpy.full((4, 1, 8, 8), 200.0), LABELS), {}, ValueError, r"whole numbers to 200, in floats; pass x\.astype"),
        ((numpy.ma.masked_equal(numpy.zeros((4, 3)), 0), LABELS), {}, ValueError, r"12 masked entries; pass x\.filled"),
        ((numpy.zeros((4, 3)), LABELS + 10**6), {}, ValueError, r"label 1000000 of 4 examples; .*return_inverse"),
        (([[1.0], [1.0, 2.0]], [0, 1]), {}, ValueError, "inhomogeneous shape"),
        ((numpy.zeros((4, 3)), list("abab")), {}, TypeError, "an array of <U1; pass numbers"),
        (([Image.new("RGB", (6, 6))] * 4, LABELS), {}, ValueError, "with channels last"),
        ((numpy.zeros((4, 3)), numpy.arange(4)), {}, ValueError, "each class has a single example"),
        ((numpy.zeros((4, 3)), LABELS), {"test": 0.0}, ValueError, r"test=0\.0; pass a share"),
        ((numpy.zeros((4, 3)), LABELS), {"test": (numpy.zeros((2, 5)), LABELS[:2])}, ValueError, "of one shape"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(pair, options, error, message):
    with pytest.raises(error, match=message):
        Data.from_arrays(pair, **options)
