"""MNIST, CIFAR-10 and Tiny ImageNet: files give the right tensors, errors name damaged files, and no downloads."""

import gzip
import os
import shutil
import socket
import subprocess
import sys

import image_files
import pytest
import torch
from image_files import BATCHES, FOLDERS, colour, idx, save
from PIL import Image

from partnets.data import cifar10, load, mnist, tiny_imagenet


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def opened(*_, **__):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", opened)
    monkeypatch.setattr(socket, "getaddrinfo", opened)


@pytest.fixture(params=["official", "."])
def layout(request):
    """Return the files' folder relative to root; None stands for the folder of their archive."""
    return None if request.param == "official" else "."


@pytest.fixture
def root(request, tmp_path, monkeypatch):
    """Return a folder with the files of the requested data set."""
    image_files.write(request.param, tmp_path, monkeypatch, ".")
    return tmp_path


def holds(part, images, labels):
    x, y = part
    assert x.dtype == torch.uint8 and y.dtype == torch.int64 and x.is_contiguous()
    return torch.equal(x, images) and torch.equal(y, torch.as_tensor(labels))


def test_mnist_is_read(layout, tmp_path, monkeypatch):
    train, test = image_files.write("mnist", tmp_path, monkeypatch, layout)
    with torch.device("meta"):  # the data are on the CPU nevertheless
        data = mnist(tmp_path)
    assert holds(data.train, train[0][:, None], train[1]) and holds(data.test, test[0][:, None], test[1])
    pixels = train[0].double() / 255
    assert data.mean + data.std == pytest.approx([pixels.mean().item(), pixels.std(correction=0).item()])
    assert (data.name, data.classes) == ("mnist", 10)
    assert torch.equal(load("mnist", tmp_path).train[0], data.train[0])


def test_cifar10_is_read(layout, tmp_path, monkeypatch):
    batches = image_files.write("cifar10", tmp_path, monkeypatch, layout)
    with torch.device("meta"):
        data = cifar10(tmp_path)
    assert holds(data.train, *(torch.cat(parts) for parts in zip(*batches[:5], strict=True)))
    assert holds(data.test, *batches[5])
    assert [255 * value for value in data.mean + data.std] == pytest.approx([125.3, 123.0, 113.9, 63.0, 62.1, 66.7])
    assert (data.name, data.classes) == ("cifar10", 10)
    assert torch.equal(load("cifar10", tmp_path).test[0], data.test[0])


def test_cifar10_is_read_of_folders_of_images(tmp_path):
    for part, count in (("train", 2), ("test", 1)):
        for label in range(10):
            for i in range(count):
                save(
                    tmp_path / "cifar10" / part / f"class-{label}" / f"{i}.png",
                    colour(label % 3, i),
                    (32, 32),
                    kind="PNG",
                )
    data = load("cifar10", tmp_path)
    assert data.train[0].shape == (20, 3, 32, 32) and data.test[1].tolist() == list(range(10))
    assert data.test[0][4, :, 0, 0].tolist() == list(colour(1, 0)) and data.mean == cifar10(tmp_path).mean
    shutil.rmtree(tmp_path / "cifar10" / "test" / "class-9")
    shutil.rmtree(tmp_path / "cifar10" / "train" / "class-9")
    with pytest.raises(ValueError, match=r"cifar10 has 9 classes of images \[3, 32, 32\]; expected 10"):
        cifar10(tmp_path)


def test_tiny_imagenet_is_read_in_the_order_of_wnids_and_labelled_by_the_annotations(layout, tmp_path, monkeypatch):
    labels = image_files.write("tiny-imagenet", tmp_path, monkeypatch, layout)
    with torch.device("meta"):
        data = tiny_imagenet(tmp_path)

    def near(x, colours):  # JPEG preserves a uniform colour up to a few levels
        return (x.int() - torch.tensor(colours)[:, :, None, None]).abs().max() <= 4

    (x, y), (test_x, test_y) = data.train, data.test
    assert x.dtype == torch.uint8 and x.shape == (24, 3, 64, 64)
    assert y.tolist() == [0] * 8 + [1] * 8 + [2] * 8 and y.dtype == torch.int64
    assert near(x, [colour(label, i) for label in range(3) for i in range(8)])
    assert test_y.tolist() == labels and near(test_x, [colour(label, 9) for label in labels])
    assert data.mean == pytest.approx((x.double() / 255).mean((0, 2, 3)).tolist())
    assert (data.name, data.classes) == ("tiny-imagenet", 3)


@pytest.mark.parametrize("root", ["tiny-imagenet"], indirect=True)
def test_a_jpeg_has_the_pixels_that_pillow_decodes_and_grey_ones_become_colour(root):
    pixels = torch.randint(256, (64, 64, 3), dtype=torch.uint8)
    for path, mode in (("n02/images/n02_0.JPEG", "RGB"), ("n01/images/n01_0.JPEG", "L")):
        Image.fromarray(pixels.numpy()).convert(mode).save(root / "train" / path, quality=90)
        with Image.open(root / "train" / path) as image:
            expected = torch.tensor(list(image.convert("RGB").tobytes()), dtype=torch.uint8).view(64, 64, 3)
        x, _ = tiny_imagenet(root).train
        assert torch.equal(x[8 * (mode == "L")], expected.permute(2, 0, 1))


@pytest.mark.parametrize("root", ["tiny-imagenet"], indirect=True)
def test_only_the_images_of_a_class_are_read(root):
    for path in ("n01/images/more/n01_9.JPEG", "n01/n01_9.JPEG", "n99/images/n99_0.JPEG"):
        save(root / "train" / path, (0, 0, 0))
    assert len(tiny_imagenet(root).train[0]) == 24


NEEDED = {
    "mnist": ("train-images-idx3-ubyte", "t10k-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "cifar10": (*BATCHES, "batches.meta"),
    "tiny-imagenet": ("wnids.txt", "val/val_annotations.txt", "val/images/val_2.JPEG", "train/n01"),
}


@pytest.mark.parametrize(
    ("root", "missing"), [(name, file) for name, files in NEEDED.items() for file in files], indirect=["root"]
)
def test_what_is_missing_is_named_with_where_it_belongs_before_anything_is_decoded(root, missing, request, monkeypatch):
    (root / missing).rename(root / "away")
    monkeypatch.setattr(Image, "open", None)
    name = request.node.callspec.params["root"]
    with pytest.raises(FileNotFoundError) as error:
        load(name, root)
    message = str(error.value)
    assert missing.removeprefix("train/") in message and str(root) in message
    if missing in (NEEDED[name][0], "wnids.txt"):  # the file by which the folder is recognised
        assert f"{root / missing}" in message and f"{root / FOLDERS[name] / missing}" in message
        assert "Nothing is downloaded" in message


@pytest.mark.parametrize("root", ["mnist"], indirect=True)
def test_gzipped_files_are_to_be_unpacked(root):
    path = root / "t10k-images-idx3-ubyte"
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"t10k-images-idx3-ubyte; expected an official file, gunzipped"):
        mnist(root)


def test_the_binary_version_of_cifar10_is_not_read(tmp_path):
    (tmp_path / "data_batch_1.bin").write_bytes(bytes(3073))
    with pytest.raises(FileNotFoundError, match=r"expected a file of cifar-10-python\.tar\.gz"):
        cifar10(tmp_path)


GOOD = idx(torch.zeros(5, 28, 28))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("t10k-images-idx3-ubyte", b"", r"begins with the bytes \[\]"),
        ("t10k-images-idx3-ubyte", GOOD[:3], r"begins with the bytes \[0, 0, 8\]"),
        ("t10k-images-idx3-ubyte", GOOD[:-1], "bytes for "),
        ("t10k-images-idx3-ubyte", GOOD + b"\0", "bytes for "),
        ("t10k-images-idx3-ubyte", b"<html>" + GOOD, r"begins with the bytes \[60, 104, 116, 109\]"),
        # mtime=0, because the content is part of the test's name and all workers must collect the same tests.
        ("t10k-images-idx3-ubyte", gzip.compress(GOOD, mtime=0), r"begins with the bytes \[31, 139, 8"),
        ("t10k-images-idx3-ubyte", idx(torch.zeros(0, 28, 28)), "bytes for 0 x 28 x 28"),
        ("t10k-images-idx3-ubyte", idx(torch.zeros(30, 784)), r"begins with the bytes \[0, 0, 8, 2\]"),
        ("t10k-images-idx3-ubyte", idx(torch.zeros(30, 8, 8)), r"for images \[30, 8, 8\]"),
        ("train-labels-idx1-ubyte", idx(torch.zeros(39)), r"has 39 labels up to 0 for images \[40, 28, 28\]"),
        ("train-labels-idx1-ubyte", idx(torch.full((40,), 10)), "has 40 labels up to 10 for"),
    ],
)
@pytest.mark.parametrize("root", ["mnist"], indirect=True)
def test_damaged_files_of_mnist_are_named(root, file, content, message):
    (root / file).write_bytes(content)
    named = file if "bytes" in message else "/" + file.split("-")[0] + r"-\*"  # either of two files
    with pytest.raises(ValueError, match=f"{named} .*{message}.*Copy it again"):
        mnist(root)


@pytest.mark.parametrize("file", ["data_batch_4", "test_batch", "batches.meta"])
@pytest.mark.parametrize("root", ["cifar10"], indirect=True)
def test_files_of_cifar10_that_are_not_the_official_ones_are_named_and_not_unpickled(root, file, tmp_path):
    bait = tmp_path / "bait"
    (root / file).write_bytes(f"c__builtin__\nopen\n(V{bait}\nVw\ntR.".encode())
    with pytest.raises(ValueError, match=rf"{file} has another MD5 than \w+; expected .*Copy it again"):
        cifar10(root)
    assert not bait.exists()


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("wnids.txt", "", "has 0 lines"),
        ("wnids.txt", "n01\nn02\nn01\n", "has 3 lines, 2 distinct"),
        ("val/val_annotations.txt", "", "has 0 lines"),
        ("val/val_annotations.txt", "val_0.JPEG\tn01\nval_1.JPEG\tn02\n", "has 2 lines.*one for each of the 3 images"),
        ("val/val_annotations.txt", "val_0.JPEG\tn01\nval_1.JPEG\tn99\n", r"'val_1.JPEG\\tn99' as line 2"),
        ("val/val_annotations.txt", "val_0.JPEG n01\n", "as line 1"),
    ],
)
@pytest.mark.parametrize("root", ["tiny-imagenet"], indirect=True)
def test_damaged_lists_of_tiny_imagenet_are_named(root, path, text, message):
    (root / path).write_text(text)
    with pytest.raises(ValueError, match=f"{path} .*{message}.*Copy it again"):
        tiny_imagenet(root)


@pytest.mark.parametrize("root", ["tiny-imagenet"], indirect=True)
def test_damaged_images_are_named(root):
    path = root / "train" / "n03" / "images" / "n03_1.JPEG"
    whole = path.read_bytes()
    for damage in (b"", b"no image", whole[: len(whole) // 2]):
        path.write_bytes(damage)
        with pytest.raises(ValueError, match=r"n03_1.JPEG cannot be decoded .*expected an image of 64x64"):
            tiny_imagenet(root)
    # A PostScript program, for which Pillow would call Ghostscript.
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n%%EOF\n")
    with pytest.raises(ValueError, match=r"n03_1.JPEG cannot be decoded \(cannot identify image file"):
        tiny_imagenet(root)
    save(path, (0, 0, 0), size=(64, 32))
    with pytest.raises(ValueError, match=r"n03_1.JPEG is an image of 64x32"):
        tiny_imagenet(root)


@pytest.mark.parametrize(
    ("root", "file"),
    [
        ("mnist", "train-images-idx3-ubyte"),
        ("mnist", "t10k-labels-idx1-ubyte"),
        ("tiny-imagenet", "wnids.txt"),
        ("tiny-imagenet", "val/val_annotations.txt"),
    ],
    indirect=["root"],
)
def test_files_that_are_far_too_large_are_not_read(root, file, request):
    os.truncate(root / file, 1 << 40)  # a sparse file
    with pytest.raises(ValueError, match=f"{file} has {1 << 40} bytes; expected .* bytes at most"):
        load(request.node.callspec.params["root"], root)


@pytest.mark.parametrize("root", ["tiny-imagenet"], indirect=True)
def test_an_image_that_is_far_too_large_is_not_decoded(root, monkeypatch):
    path = root / "train" / "n03" / "images" / "n03_1.JPEG"
    save(path, 0, size=(9000, 9000), mode="1", kind="PNG")  # 2 kB in the file, 0.25 GB when decoded in colour
    monkeypatch.setattr(Image.Image, "convert", lambda picture, mode: picture if picture.size == (64, 64) else 1 / 0)
    with pytest.raises(ValueError, match=r"n03_1.JPEG is an image of 9000x9000; expected one of 64x64"):
        tiny_imagenet(root)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # Pillow rejects images with twice as many pixels
    with pytest.raises(ValueError, match=r"JPEG cannot be decoded \(Image size .* decompression bomb"):
        tiny_imagenet(root)


@pytest.mark.parametrize("name", sorted({*FOLDERS} - {"mnist"}))
def test_without_torchvision_the_cure_is_named(name, tmp_path, monkeypatch):
    for module in ("torchvision.datasets", "torchvision.datasets.folder"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match="pip install the torchvision that belongs to PyTorch"):
        load(name, tmp_path)


def test_a_torchvision_of_another_pytorch_is_told(tmp_path, monkeypatch):
    def import_module(name):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("partnets.data.folders.import_module", import_module)
    with pytest.raises(ImportError, match=r"\(operator .* does not exist\); .* belongs to PyTorch \d"):
        cifar10(tmp_path)


@pytest.mark.full
def test_torchvision_is_imported_only_when_files_are_read():
    code = "import sys, partnets.data; print(*{'torchvision', 'PIL', 'sklearn'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
