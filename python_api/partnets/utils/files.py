"""Atomic replacement of files."""

from __future__ import annotations

import glob
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

# The age in seconds at which a temporary file was left by a process that was killed.
OLD = 24 * 3600


@contextmanager
def replacing(path: str | os.PathLike[str], *, binary: bool = False) -> Iterator[IO]:
    """Open a temporary file beside `path` that replaces it when the block ends without error.

    An interruption leaves the old file and no other. A temporary file left by a killed process is deleted by a write to
    this path a day later. If several threads or processes write to one path, the last one to end wins.

    Args:
        path: the file, which need not exist, in an existing folder. Links are followed.
        binary: whether to write bytes; otherwise text, in UTF-8 with newlines as written.

    Raises:
        OSError: the folder does not exist or cannot be written to, or the path is that of a folder or a device.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "notes.txt"
        >>> with replacing(path) as file:
        ...     _ = file.write("rotation")
        >>> path.read_text()
        'rotation'
    """
    path = regular(path)
    if not path.parent.exists():
        raise FileNotFoundError(f"{path.parent}, the folder of {path.name}, does not exist; create it first.")
    start = f".{path.name[:50]}.partial-"  # short, as the names of files have at most 255 bytes
    for left in path.parent.glob(glob.escape(start) + "*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > OLD:
                left.unlink()
    # Not tempfile: its files are readable only by their owner, and stay so when they are renamed.
    temporary = path.with_name(start + secrets.token_hex(8))
    how = {"mode": "xb"} if binary else {"mode": "x", "encoding": "utf-8", "newline": ""}
    try:
        with open(temporary, **how) as file:
            with suppress(OSError):  # keep the old file's permissions
                os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def regular(path: str | os.PathLike[str]) -> Path:
    """Return the file that a path leads to, following all links; it need not exist.

    Raises:
        OSError: the path is a folder, a device, a pipe or a socket.

    Example:
        >>> regular("/dev/null")
        Traceback (most recent call last):
        OSError: /dev/null is a device, a pipe or a socket; pass the path of a file.
    """
    real = Path(os.path.realpath(path))
    with suppress(FileNotFoundError):
        mode = real.stat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(f"{path} is a folder; pass the path of a file in it.")
        if not stat.S_ISREG(mode):
            raise OSError(f"{path} is a device, a pipe or a socket; pass the path of a file.")
    return real
