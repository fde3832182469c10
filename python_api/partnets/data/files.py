"""Finding the files of a data set, and saying what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from torch import Tensor


def find(root: str | PathLike, names: Sequence[str], what: str, content: str) -> Path:
    """The first of the files root/name that exists.

    Raises:
        FileNotFoundError: none does. It says where they were looked for and what they contain.

    Example:
        >>> find("nowhere", ["labels", "labels.gz"], "labels of Toys", "a byte each")
        Traceback (most recent call last):
        FileNotFoundError: no labels of Toys: looked for nowhere/labels, nowhere/labels.gz; expected a byte each. Nothing is downloaded: put the official files there, or pass the folder that holds them as root.
    """  # noqa: E501, a message is one line
    paths = [Path(root, name) for name in names]
    for path in paths:
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"no {what}: looked for {', '.join(map(str, paths))}; expected {content}. Nothing is downloaded: put the"
        " official files there, or pass the folder that holds them as root."
    )


def damaged(path: Path, found: str, expected: str) -> ValueError:
    """The error for a file that is not what it should be."""
    return ValueError(f"{path} {found}; expected {expected}. Copy it anew from the official archive.")


def check_labels(labels: Tensor, classes: int, path: Path) -> None:
    """Raises ValueError unless labels, none negative, are below classes."""
    if labels.max() >= classes:
        raise damaged(path, f"has a label {labels.max()}", f"labels in 0..{classes - 1}")
