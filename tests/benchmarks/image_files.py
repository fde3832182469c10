"""Small files of MNIST, CIFAR-10 and Tiny ImageNet in the formats of the official archives."""

import hashlib
import pickle

import torch
from PIL import Image

WNIDS = ("n02", "n01", "n03")  # not sorted, as in the official wnids.txt
BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
FOLDERS = {"mnist": "MNIST/raw", "cifar10": "cifar-10-batches-py", "tiny-imagenet": "tiny-imagenet-200"}


def idx(values):
    """Return the content of an IDX file with a tensor of bytes."""
    shape = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes([0, 0, 8, values.dim()]) + shape + values.to(torch.uint8).numpy().tobytes()


def save(path, pixel, size=(64, 64), kind="JPEG"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, pixel).save(path, kind, quality=95)


def colour(label, i):
    return (80 * label + 20, 10 * i, 30 + 10 * label)


def write(name, root, monkeypatch, folder=None):
    """Write a data set into its default folder in root, or into `folder`.

    Returns:
        The images and labels of the training and the test set; of Tiny ImageNet a colour for each image.
    """
    folder = root / (folder or FOLDERS[name])
    folder.mkdir(parents=True, exist_ok=True)
    return {"mnist": _mnist, "cifar10": _cifar10, "tiny-imagenet": _tiny_imagenet}[name](folder, monkeypatch)


def _mnist(folder, _):
    parts = [(torch.randint(256, (n, 28, 28), dtype=torch.uint8), torch.arange(n) % 10) for n in (40, 30)]
    for name, (images, labels) in zip(("train", "t10k"), parts, strict=True):
        (folder / f"{name}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(idx(labels))
    return [(images[:, None], labels) for images, labels in parts]


def _cifar10(folder, monkeypatch):
    """Write the pickles, and make torchvision expect their checksums."""
    from torchvision.datasets import CIFAR10

    batches = [(torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8), (torch.arange(6) + i) % 10) for i in range(6)]
    for name, (images, labels) in zip(BATCHES, batches, strict=True):
        content = {"data": images.flatten(1).numpy(), "labels": labels.tolist()}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": ["airplane"]}, protocol=2))
    md5 = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}
    monkeypatch.setattr(CIFAR10, "train_list", [[name, md5[name]] for name in BATCHES[:5]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", md5["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": md5["batches.meta"]})
    return [tuple(map(torch.cat, zip(*batches[:5], strict=True))), batches[5]]


def _tiny_imagenet(folder, _):
    tested = [1, 0, 2]
    (folder / "wnids.txt").write_text("".join(f"{wnid}\n" for wnid in WNIDS))
    for label, wnid in enumerate(WNIDS):
        for i in range(8):
            save(folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", colour(label, i))
    for i, label in enumerate(tested):
        save(folder / "val" / "images" / f"val_{i}.JPEG", colour(label, 9))
    lines = [f"val_{i}.JPEG\t{WNIDS[label]}\t0\t32\t44\t62\n" for i, label in enumerate(tested)]
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    trained = [label for label in range(3) for _ in range(8)]
    return [
        (torch.tensor([colour(label, i % 8) for i, label in enumerate(trained)]), torch.tensor(trained)),
        (torch.tensor([colour(label, 9) for label in tested]), torch.tensor(tested)),
    ]
