"""Tiny ImageNet: 64x64 colour images of 200 classes, from its folders of JPEG files."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from partnets.data.dataset import Data, moments
from partnets.data.files import damaged, find

SIZE = 64
JPEG = f"JPEG images of {SIZE}x{SIZE}"


def tiny_imagenet(root: str | PathLike) -> Data:
    """Reads Tiny ImageNet (Le and Yang 2015): 100000 training images, and the 10000 of its validation set to test.

    The official test set has no labels. Decoding takes a minute or more and is shown on a terminal; grey images become
    colour. Needs Pillow.

    Args:
        root: the folder of what tiny-imagenet-200.zip holds, or that of its tiny-imagenet-200: wnids.txt,
            train/<wnid>/images/*.JPEG, val/val_annotations.txt and val/images/*.JPEG.

    Returns:
        Images uint8 [n, 3, 64, 64], red, green and blue; label i is line i + 1 of wnids.txt. As many images and classes
        as there are.

    Raises:
        ImportError: Pillow is not installed.
        FileNotFoundError: a file is missing; before anything is decoded.
        ValueError: a file is damaged.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for folder in ("train/n01443537/images", "val/images"):
        ...         Path(root, folder).mkdir(parents=True)
        ...         Image.new("RGB", (64, 64)).save(Path(root, folder, "0.JPEG"))
        ...     _ = Path(root, "wnids.txt").write_text("n01443537\\n")
        ...     _ = Path(root, "val/val_annotations.txt").write_text("0.JPEG\\tn01443537\\t0\\t0\\t62\\t62\\n")
        ...     tiny_imagenet(root)
        Data(tiny-imagenet: 1 examples to train and 1 to test, [3, 64, 64] of uint8, 1 classes)
    """
    try:
        import PIL  # noqa: F401, asked for before minutes of work
    except ImportError as error:
        raise ImportError("tiny_imagenet decodes JPEG with Pillow; pip install partkernels[data].") from error
    wnids_path = find(
        root,
        ["wnids.txt", "tiny-imagenet-200/wnids.txt"],
        "list of Tiny ImageNet's classes",
        "a WordNet id a line, officially 200",
    )
    wnids = wnids_path.read_text(errors="replace").split()
    if not wnids or len(set(wnids)) < len(wnids):
        raise damaged(wnids_path, f"has {len(wnids)} lines, {len(set(wnids))} distinct", "a WordNet id a line")
    train = _training_files(wnids_path.parent, wnids)
    test = _validation_files(wnids_path.parent, wnids)
    train, test = _decode(train, "training images"), _decode(test, "test images")
    return Data("tiny-imagenet", train, test, len(wnids), *moments(train[0]))


def _training_files(folder: Path, wnids: list[str]) -> list[tuple[Path, int]]:
    files = []
    for label, wnid in enumerate(wnids):
        images = folder / "train" / wnid / "images"
        paths = sorted(images.glob("*.JPEG"))
        if not paths:
            raise FileNotFoundError(
                f"no training images of Tiny ImageNet's class {wnid}: looked for {images}/*.JPEG; expected {JPEG},"
                " officially 500. Unpack tiny-imagenet-200.zip anew."
            )
        files += [(path, label) for path in paths]
    return files


def _validation_files(folder: Path, wnids: list[str]) -> list[tuple[Path, int]]:
    expected = "lines of a file's name, a tab and a WordNet id of wnids.txt, officially 10000"
    annotations = find(folder, ["val/val_annotations.txt"], "labels of Tiny ImageNet's validation set", expected)
    labels = {wnid: label for label, wnid in enumerate(wnids)}
    files = []
    for number, line in enumerate(annotations.read_text(errors="replace").splitlines(), start=1):
        name, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0]
        if wnid not in labels:
            raise damaged(annotations, f"has {line!r} as line {number}", expected)
        files.append((find(folder, [f"val/images/{name}"], f"validation image {name}", JPEG), labels[wnid]))
    images = sum(1 for _ in (folder / "val" / "images").glob("*.JPEG"))
    if len(files) != images or not files:
        raise damaged(annotations, f"has {len(files)} lines", f"{expected}: one for each of the {images} images")
    return files


def _decode(files: list[tuple[Path, int]], what: str) -> tuple[Tensor, Tensor]:
    images = torch.empty(len(files), 3, SIZE, SIZE, dtype=torch.uint8, device="cpu")
    for image, (path, _) in zip(images, tqdm(files, desc=what, unit=" images", disable=None), strict=True):
        image.copy_(_decode_one(path))
    return images, torch.tensor([label for _, label in files], device="cpu")


def _decode_one(path: Path) -> Tensor:
    from PIL import Image

    try:
        with Image.open(path, formats=["JPEG"]) as image:
            if image.size != (SIZE, SIZE):
                raise damaged(path, f"is an image of {image.width}x{image.height}", f"one of {JPEG}")
            content = image.convert("RGB").tobytes()
    except (OSError, SyntaxError) as error:  # Pillow's errors for damaged files
        raise damaged(path, f"cannot be decoded ({error})", f"one of {JPEG}") from error
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(SIZE, SIZE, 3).permute(2, 0, 1)
