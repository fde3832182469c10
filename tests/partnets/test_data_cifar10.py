"""CIFAR-10: both versions give the same tensors, and no pickle runs anything."""

import io
import pickle
import struct
from typing import ClassVar

import numpy as np
import pytest
import torch

from partnets.data import cifar10, load
from partnets.data.array_pickle import read_pickle

NAMES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def content():
    """Each file's images [n, 3072] and labels [n]."""
    return {
        name: (torch.randint(256, (n, 3072), dtype=torch.uint8), (torch.arange(n) + i) % 10)
        for i, (name, n) in enumerate(zip(NAMES, (3, 3, 3, 3, 3, 2), strict=True))
    }


def write_binary(folder, batches):
    folder.mkdir(parents=True, exist_ok=True)
    for name, (images, labels) in batches.items():
        records = torch.cat([labels.to(torch.uint8)[:, None], images], dim=1)
        (folder / f"{name}.bin").write_bytes(bytes(records.flatten().tolist()))


class Python2Pickler(pickle._Pickler):
    """Writes what Python 2 with NumPy 1 wrote in protocol 2: byte strings, and NumPy's functions under old names."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_bytes(self, value):
        self.write(pickle.BINSTRING + struct.pack("<i", len(value)) + value)
        self.memoize(value)

    def save_str(self, value):
        self.save_bytes(value.encode())

    def save_global(self, value, name=None):
        module = "numpy.core.multiarray" if value.__name__ == "_reconstruct" else "numpy"
        self.write(pickle.GLOBAL + f"{module}\n{value.__name__}\n".encode())
        self.memoize(value)

    dispatch[bytes], dispatch[str], dispatch[type] = save_bytes, save_str, save_global


def by_python2(value):
    buffer = io.BytesIO()
    Python2Pickler(buffer, protocol=2).dump(value)
    return buffer.getvalue()


def by_python3(value):
    return pickle.dumps(value, protocol=4)


def batch(images, labels, name=b"testing batch 1 of 1"):
    return {b"batch_label": name, b"labels": labels.tolist(), b"data": images.numpy(), b"filenames": [b"cat_s_1.png"]}


def write_pickles(folder, batches, dump=by_python2):
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in batches.items():
        (folder / name).write_bytes(dump(batch(*part)))


def assert_holds(data, batches):
    train = [batches[name] for name in NAMES[:5]]
    for (x, y), parts in ((data.train, train), (data.test, [batches["test_batch"]])):
        assert x.dtype == torch.uint8 and y.dtype == torch.int64
        assert torch.equal(x, torch.cat([images for images, _ in parts]).view(-1, 3, 32, 32))
        assert torch.equal(y, torch.cat([labels for _, labels in parts]))


@pytest.mark.parametrize("folder", [".", "cifar-10-batches-bin"])
def test_the_binary_version_is_read(folder, tmp_path):
    batches = content()
    write_binary(tmp_path / folder, batches)
    data = cifar10(tmp_path)
    assert_holds(data, batches)
    assert (data.name, data.classes) == ("cifar10", 10)
    assert [255 * value for value in data.mean + data.std] == pytest.approx([125.3, 123.0, 113.9, 63.0, 62.1, 66.7])
    assert torch.equal(load("cifar10", tmp_path).test[0], data.test[0])


@pytest.mark.parametrize("folder", [".", "cifar-10-batches-py"])
@pytest.mark.parametrize("dump", [by_python2, by_python3])
def test_the_python_version_is_read(folder, dump, tmp_path):
    batches = content()
    write_pickles(tmp_path / folder, batches, dump)
    assert_holds(cifar10(tmp_path), batches)


@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 3, 4)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_come_back_in_either_memory_order(shape, order, tmp_path):
    array = np.asarray(np.arange(np.prod(shape), dtype=np.uint8).reshape(shape), order=order)
    path = tmp_path / "array"
    path.write_bytes(by_python3(array))
    assert read_pickle(path, "an array").tensor.tolist() == array.tolist()


def test_the_pickles_of_these_tests_are_as_python_2_wrote_them():
    images, labels = content()["test_batch"]
    written = by_python2(batch(images, labels))
    assert b"cnumpy.core.multiarray\n_reconstruct\n" in written and b"_codecs" not in written
    read = pickle.loads(written.replace(b"numpy.core.", b"numpy._core."), encoding="bytes")
    assert np.array_equal(read[b"data"], images.numpy()) and read[b"labels"] == labels.tolist()


def test_without_files_both_versions_are_described(tmp_path):
    with pytest.raises(FileNotFoundError, match="Nothing is downloaded") as error:
        cifar10(tmp_path)
    for name in ("data_batch_1.bin", "cifar-10-batches-bin/data_batch_1.bin", "cifar-10-batches-py/data_batch_1"):
        assert str(tmp_path / name) in str(error.value)


@pytest.mark.parametrize("missing", NAMES[1:])
@pytest.mark.parametrize("write", [write_binary, write_pickles])
def test_all_batches_must_be_there(missing, write, tmp_path):
    batches = content()
    del batches[missing]
    write(tmp_path, batches)
    with pytest.raises(FileNotFoundError, match=f"no {missing} of CIFAR-10"):
        cifar10(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (b"", "has 0 bytes; expected a multiple of 3073"),
        (bytes(3072), "has 3072 bytes"),
        (bytes(3074), "has 3074 bytes"),
        (bytes([10]) + bytes(3072), r"has a label 10; expected labels in 0\.\.9"),
    ],
)
def test_damaged_records_raise(damage, message, tmp_path):
    write_binary(tmp_path, content())
    (tmp_path / "data_batch_3.bin").write_bytes(damage)
    with pytest.raises(ValueError, match=f"data_batch_3.bin {message}"):
        cifar10(tmp_path)


IMAGES, LABELS = torch.zeros(2, 3072, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2], "has no array of images"),
        ({b"labels": [1, 2]}, "has no array of images"),
        ({b"data": b"\0" * 3072, b"labels": [1]}, "has no array of images"),
        (batch(IMAGES[:, :3071], LABELS), "has no array of images"),
        (batch(IMAGES.view(-1), LABELS), "has no array of images"),
        (batch(IMAGES, LABELS[:1]), "has 2 images and 1 labels"),
        (batch(IMAGES, LABELS + 10), "no list of labels in 0..9"),
        (batch(IMAGES, LABELS - 1), "no list of labels in 0..9"),
        (batch(IMAGES, LABELS.double()), "no list of labels in 0..9"),
        (batch(IMAGES, LABELS) | {b"labels": b"\0\0"}, "no list of labels in 0..9"),
        (batch(IMAGES.float(), LABELS), "an array of other things than bytes"),
    ],
)
def test_pickles_of_something_else_raise(value, message, tmp_path):
    write_pickles(tmp_path, content())
    (tmp_path / "test_batch").write_bytes(by_python3(value))
    with pytest.raises(ValueError, match=f"test_batch .*{message}"):
        cifar10(tmp_path)


class Evaluate:
    """Pickled, it runs code when it is read."""

    def __init__(self, code):
        self.code = code

    def __reduce__(self):
        return eval, (self.code,)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_malicious_pickle_is_refused_and_does_not_run(protocol, tmp_path):
    bait = tmp_path / "bait"
    evil = pickle.dumps([Evaluate(f"__import__('pathlib').Path({str(bait)!r}).touch()")], protocol=protocol)
    write_pickles(tmp_path, content())
    (tmp_path / "data_batch_2").write_bytes(evil)
    with pytest.raises(ValueError, match=r"data_batch_2 .*it asks for \w+\.eval, which was not run"):
        cifar10(tmp_path)
    assert not bait.exists()
    pickle.loads(evil)
    assert bait.exists()  # so it was malicious


def test_code_beside_good_arrays_does_not_run_either(tmp_path):
    bait = tmp_path / "bait"
    attack = Evaluate(f"__import__('pathlib').Path({str(bait)!r}).touch()")
    write_pickles(tmp_path, content())
    (tmp_path / "test_batch").write_bytes(by_python3(batch(IMAGES, LABELS, name=attack)))
    with pytest.raises(ValueError, match=r"it asks for builtins\.eval"):
        cifar10(tmp_path)
    assert not bait.exists()


@pytest.mark.parametrize(
    "name",
    [
        "os\nsystem",
        "builtins\neval",
        "__builtin__\ngetattr",
        "numpy\nload",
        "numpy\nndarray.tofile",
        "numpy.core.multiarray\nfromfile",
        "torch\nload",
        "partnets.data.array_pickle\nArray",
    ],
)
def test_no_other_function_is_admitted(name, tmp_path):
    path = tmp_path / "batch"
    path.write_bytes(f"c{name}\n.".encode())
    with pytest.raises(ValueError, match="it asks for"):
        read_pickle(path, "a batch")


def test_a_pickle_cannot_change_the_classes_that_stand_for_numpys(tmp_path):
    from partnets.data import array_pickle

    before = {stand: dict(vars(stand)) for stand in (array_pickle.Array, array_pickle.Dtype)}
    for name in ("numpy\nndarray", "numpy\ndtype", "numpy.core.multiarray\n_reconstruct"):
        for state in (b"}U\x06tensorI1\ns", b"N}U\x06tensorI1\ns\x86"):
            path = tmp_path / "batch"
            path.write_bytes(b"\x80\x02c" + name.encode() + b"\n" + state + b"b.")
            with pytest.raises(ValueError, match="cannot be read"):
                read_pickle(path, "a batch")
    assert before == {stand: dict(vars(stand)) for stand in before}


@pytest.mark.parametrize(
    "damage", [b"", b"\x80", b"not a pickle", by_python2(batch(IMAGES, LABELS))[:-20], b"\x80\x63."]
)
def test_what_is_no_pickle_raises(damage, tmp_path):
    path = tmp_path / "batch"
    path.write_bytes(damage)
    with pytest.raises(ValueError, match=r"cannot be read as a pickle of arrays .*expected a batch"):
        read_pickle(path, "a batch")


def test_a_training_file_that_is_cut_after_an_image_raises(tmp_path):
    batches = content()
    batches["data_batch_4"] = tuple(part[:2] for part in batches["data_batch_4"])
    write_binary(tmp_path, batches)
    with pytest.raises(ValueError, match=r"data_batch_4\.bin has 2 images; expected 3, as others of the five have"):
        cifar10(tmp_path)
