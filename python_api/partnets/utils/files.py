"""Files that are replaced as a whole or not at all."""

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
except ImportError:  # Windows, where nothing is locked, and what was left is not found
    fcntl = None

# On a network file system the locks of one host may be unknown to another: each clears up after itself alone.
HOST = hashlib.blake2b(platform.node().encode(), digest_size=4).hexdigest()


@contextmanager
def replacing(path: str | os.PathLike, *, binary: bool = False) -> Iterator[IO]:
    """A file beside `path`, which takes its place where the block ends without error.

    An interruption leaves the old file, and nothing beside it. What a process that was killed has left is deleted when
    this path is next written to on the same host. Of several threads or processes that write to one path, the last one
    to end wins.

    Args:
        path: the file, which need not be there; its folder must. Where it is a link, the file that it leads to.
        binary: for bytes; otherwise for text, UTF-8 with newlines as written.

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
        raise FileNotFoundError(f"{path.parent}, the folder of {path.name}, is not there; make it first.")
    name = os.fsencode(path.name)
    # The longest names leave no place for the rest of the temporary one.
    start = f".{path.name if len(name) < 200 else hashlib.blake2b(name, digest_size=16).hexdigest()}.{HOST}."
    for left in path.parent.glob(glob.escape(start) + "*"):
        with suppress(OSError), open(left, "r+b") as file:
            if _lock(file, wait=False):
                left.unlink()
    how = {"mode": "xb"} if binary else {"mode": "x", "encoding": "utf-8", "newline": ""}
    while True:
        # Not tempfile: its files are readable by their owner alone, and stay so when they are renamed.
        temporary = path.with_name(start + secrets.token_hex(8))
        with open(temporary, **how) as file:
            _lock(file)
            if not temporary.exists():
                continue  # it was found before it was locked, and taken for one that was left
            with suppress(OSError):  # who may read it stays
                os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                if fcntl is None:
                    file.close()  # Windows renames no open file
                os.replace(temporary, path)
            except BaseException:
                with suppress(OSError):  # as of a disk that is full
                    file.close()
                temporary.unlink(missing_ok=True)
                raise
            return


def regular(path: str | os.PathLike) -> Path:
    """The file that a path leads to, over all links; it need not be there.

    Raises:
        OSError: it is a folder, a device, a pipe or a socket.

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
    """Locks a file as long as it is open: with its process, however that ends, the lock ends too.

    Returns:
        Whether it is locked; False where there are no locks, and where another holds it and this is not to wait.
    """
    with suppress(OSError):
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return True
    return False
