"""MNIST and its file format, IDX: every layout is found, and every damage is told."""

import gzip
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partnets.data import load, mnist
from partnets.data.idx import read_idx

STEMS = ("train-images", "train-labels", "t10k-images", "t10k-labels")


def idx(values, kind=8):
    """A tensor of bytes as an IDX file's content."""
    shape = struct.pack(f">{values.dim()}I", *values.shape)
    return bytes([0, 0, kind, values.dim()]) + shape + bytes(values.flatten().to(torch.uint8).tolist())


def content():
    """The four files of a small MNIST: 12 examples to train and 5 to test."""
    tensors = {}
    for part, n in (("train", 12), ("t10k", 5)):
        tensors[f"{part}-images"] = torch.randint(256, (n, 28, 28), dtype=torch.uint8)
        tensors[f"{part}-labels"] = (torch.arange(n) % 10).to(torch.uint8)
    return tensors


def write(folder, tensors, dot="-", gz=False):
    folder.mkdir(parents=True, exist_ok=True)
    for stem, tensor in tensors.items():
        name = f"{stem}{dot}idx{tensor.dim()}-ubyte"
        if gz:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(tensor)))
        else:
            (folder / name).write_bytes(idx(tensor))


@pytest.mark.parametrize("folder", [".", "MNIST/raw"])
@pytest.mark.parametrize("dot", ["-", "."])
@pytest.mark.parametrize("gz", [False, True])
def test_mnist_is_read_from_every_layout(folder, dot, gz, tmp_path):
    tensors = content()
    write(tmp_path / folder, tensors, dot, gz)
    data = mnist(tmp_path)
    for (x, y), part in ((data.train, "train"), (data.test, "t10k")):
        assert torch.equal(x, tensors[f"{part}-images"][:, None])
        assert torch.equal(y, tensors[f"{part}-labels"].long()) and y.dtype == torch.int64
    pixels = tensors["train-images"].double() / 255
    assert data.mean == pytest.approx([pixels.mean().item()])
    assert data.std == pytest.approx([pixels.std(correction=0).item()])
    assert (data.name, data.classes) == ("mnist", 10)
    assert torch.equal(load("mnist", tmp_path).train[0], data.train[0])


@pytest.mark.parametrize("stem", STEMS)
def test_a_missing_file_is_named_with_everywhere_it_was_looked_for(stem, tmp_path):
    tensors = content()
    del tensors[stem]
    write(tmp_path, tensors)
    with pytest.raises(FileNotFoundError, match="Nothing is downloaded") as error:
        mnist(tmp_path)
    images = "images" in stem
    kind = "idx3-ubyte" if images else "idx1-ubyte"
    # Labels belong to the images that were found, and lie beside them.
    for folder in ("", "MNIST/raw/") if images else ("",):
        for name in (f"{stem}-{kind}", f"{stem}.{kind}.gz"):
            assert str(tmp_path / folder / name) in str(error.value)


def test_a_missing_file_is_described_by_the_official_one(tmp_path):
    with pytest.raises(FileNotFoundError, match="60000 images of 28x28, 47040016 bytes"):
        mnist(tmp_path)


@pytest.mark.parametrize(
    ("stem", "tensor", "message"),
    [
        ("train-labels", torch.zeros(11, dtype=torch.uint8), "has 11 labels; expected 12, one for each image"),
        ("t10k-labels", torch.full((5,), 10, dtype=torch.uint8), r"has a label 10; expected labels in 0\.\.9"),
        ("t10k-images", torch.zeros(5, 8, 8, dtype=torch.uint8), "has images of 8x8; expected 28x28"),
    ],
)
def test_files_that_do_not_fit_raise(stem, tensor, message, tmp_path):
    write(tmp_path, content() | {stem: tensor})
    with pytest.raises(ValueError, match=f"{stem}.*{message}"):
        mnist(tmp_path)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4).flatmap(
        lambda shape: st.binary(min_size=(n := torch.Size(shape).numel()), max_size=n).map(lambda b: (shape, b))
    ),
    st.booleans(),
)
def test_idx_of_any_shape_comes_back(tmp_path_factory, shaped, gz):
    shape, values = shaped
    tensor = torch.tensor(list(values), dtype=torch.uint8).view(shape)
    path = tmp_path_factory.mktemp("idx") / ("array.gz" if gz else "array")
    path.write_bytes(gzip.compress(idx(tensor)) if gz else idx(tensor))
    assert torch.equal(read_idx(path, len(shape)), tensor)


GOOD = idx(torch.arange(6, dtype=torch.uint8).view(2, 3))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (b"", "begins with nothing"),
        (GOOD[:3], "begins with 000008"),
        (GOOD[:9], "begins with 00000802"),
        (idx(torch.zeros(2, 3), kind=0x0D), "begins with 00000d02; expected IDX of bytes in 2 dimensions"),
        (idx(torch.zeros(6)), "begins with 00000801; .* beginning with 00000802"),
        (b"<html>" + GOOD, "begins with 3c68746d"),
        (GOOD[:-1], r"says 2x3 and has 17 bytes; expected 12 \+ 2x3"),
        (GOOD + b"\0", "says 2x3 and has 19 bytes"),
        (idx(torch.zeros(0, 3)), "says 0x3 and has 12 bytes; .* more than 12"),
    ],
)
@pytest.mark.parametrize("gz", [False, True])
def test_damaged_idx_raises(damage, message, gz, tmp_path):
    path = tmp_path / ("array.gz" if gz else "array")
    path.write_bytes(gzip.compress(damage) if gz else damage)
    with pytest.raises(ValueError, match=f"{path.name} {message}.*Copy it anew"):
        read_idx(path, 2)


@pytest.mark.parametrize(
    "damage",
    [gzip.compress(GOOD)[:-9], gzip.compress(GOOD)[:4], GOOD, gzip.compress(GOOD)[:12] + b"\xff" * 30],
    ids=["truncated", "header", "plain", "garbled"],
)
def test_gzip_that_is_none_or_is_cut_short_raises(damage, tmp_path):
    path = tmp_path / "array.gz"
    path.write_bytes(damage)
    with pytest.raises(ValueError, match="cannot be decompressed"):
        read_idx(path, 2)
