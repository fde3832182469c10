"""Files of torch.save with a checksum at the end, so that any changed bit is detected, and one version number.

torch.save's zip has checksums only of records, which torch.load does not check. torch.load can read these files too.
"""

from __future__ import annotations

import hashlib
import os
from os import PathLike
from typing import IO, Any

import torch

from partnets.utils.files import regular, replacing

# The version of all files; others are refused.
VERSION = 5
# A file ends with MARK and the 32 bytes of the checksum.
MARK = b"partnets blake2b"


def save(contents: dict[str, Any], path: str | PathLike[str]) -> None:
    """Write a file for `load`, atomically.

    Raises:
        ValueError: the contents have something other than plain values and tensors.
        OSError: as for `replacing`.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "one.pt"
        >>> save({"x": torch.ones(2)}, path)
        >>> load(path, "file of ours; pass one.")
        {'x': tensor([1., 1.])}
        >>> damaged = bytearray(path.read_bytes())
        >>> damaged[500] ^= 1
        >>> _ = path.write_bytes(damaged)
        >>> load(path, "file of ours; pass one.")
        Traceback (most recent call last):
        ValueError: ...one.pt is damaged: it has another checksum than when it was saved; ...
    """
    with replacing(path, binary=True) as file:
        torch.save(contents | {"version": VERSION}, file)
        file.flush()
        if code := torch.serialization.get_unsafe_globals_in_checkpoint(file.name):
            raise ValueError(
                f"the checkpoint would need {', '.join(code)}, which Trainer.load does not run; give optimisers and"
                " schedulers Python's numbers and torch's tensors, not NumPy's, and no functions inside objects."
            )
        with open(file.name, "rb") as written:
            checksum = _checksum(written, file.tell())
        file.write(MARK + checksum)


def load(path: str | PathLike[str], expected: str) -> dict[str, Any]:
    """Load a file that `save` wrote to the CPU, without running code from it.

    Args:
        expected: "checkpoint; pass ...", for the error.

    Raises:
        ValueError: the file is damaged, of another version, or `save` did not write it.
        OSError: the file does not exist or cannot be read.
    """
    with open(regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size - len(MARK) - 32
        file.seek(max(size, 0))
        end = file.read()
        if size < 0 or not end.startswith(MARK):
            raise ValueError(f"{path} is not a {expected}")
        if end != MARK + _checksum(file, size):
            raise ValueError(
                f"{path} is damaged: it has another checksum than when it was saved; pass an undamaged copy, or an"
                " earlier file."
            )
        file.seek(0)
        contents = torch.load(file, map_location="cpu", weights_only=True)
    if (version := contents.pop("version", None)) != VERSION:
        raise ValueError(f"{path} is of version {version}, but this program has version {VERSION}; save it again.")
    return contents


def _checksum(file: IO[bytes], size: int) -> bytes:
    """Return the checksum of the first `size` bytes, at 1.3 GB/s; SHA-256 without hardware support has 0.5 GB/s."""
    file.seek(0)
    found = hashlib.blake2b(digest_size=32)
    while size and (part := file.read(min(size, 1 << 20))):
        found.update(part)
        size -= len(part)
    return found.digest()
