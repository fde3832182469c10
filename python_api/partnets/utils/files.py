"""Atomic replacement of files."""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # on Windows, files are not locked and leftover temporary files are not deleted
    fcntl = None

# On a network file system, hosts may not see each other's locks, so each host deletes only its own leftover files.
HOST = hashlib.blake2b(platform.node().encode(), digest_size=4).hexdigest()


@contextmanager
def replacing(path: str | os.PathLike, *, binary: bool = False) -> Iterator[IO]:
    """Open a temporary file beside `path` that replaces it when the block ends without error.

    An interruption leaves the old file and no other. A temporary file left by a killed process is deleted at the next
    write to this path on the same host. If several threads or processes write to one path, the last one to end wins.

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
    name = os.fsencode(path.name)
    # Long names are hashed, to leave room for the rest of the temporary name.
    start = f".{path.name if len(name) < 200 else hashlib.blake2b(name, digest_size=16).hexdigest()}.{HOST}."
    for left in path.parent.glob(glob.escape(start) + "*"):
        with suppress(OSError), open(left, "r+b") as file:
            if _lock(file, wait=False):
                left.unlink()
    how = {"mode": "xb"} if binary else {"mode": "x", "encoding": "utf-8", "newline": ""}
    while True:
        # Not tempfile: its files are readable only by their owner, and stay so when they are renamed.
        temporary = path.with_name(start + secrets.token_hex(8))
        with open(temporary, **how) as file:
            _lock(file)
            if not temporary.exists():
                continue  # another process deleted it as a leftover before it was locked
            with suppress(OSError):  # keep the old file's permissions
                os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                if fcntl is None:
                    file.close()  # Windows cannot rename open files
                os.replace(temporary, path)
            except BaseException:
                with suppress(OSError):  # such as a full disk
                    file.close()
                temporary.unlink(missing_ok=True)
                raise
            return


def regular(path: str | os.PathLike) -> Path:
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


def _lock(file: IO, *, wait: bool = True) -> bool:
    """Lock a file until it is closed or its process ends.

    Returns:
        Whether it is locked; False if locks are not available, or another process has the lock and wait is False.
    """
    with suppress(OSError):
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return True
    return False
