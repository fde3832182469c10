"""Files that are replaced as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: str | os.PathLike, *, binary: bool = False) -> Iterator[IO]:
    """A file beside `path`, which takes its place where the block ends without error.

    An interruption leaves the old file, and nothing beside it.

    Args:
        path: the file, which need not be there; its folder must.
        binary: for bytes; otherwise for text, UTF-8 with newlines as written.

    Raises:
        OSError: the folder does not exist or cannot be written to.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "notes.txt"
        >>> with replacing(path) as file:
        ...     _ = file.write("rotation")
        >>> path.read_text()
        'rotation'
    """
    path = Path(path)
    # Not tempfile: its files are readable by their owner alone, and stay so when they are renamed.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") if binary else open(temporary, "w", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
