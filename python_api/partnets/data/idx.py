"""IDX, MNIST's file format: a header with the shape, then the bytes of an array."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

from partnets.data.files import damaged

UINT8 = 0x08


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Reads an IDX file of bytes, gzipped if it is named .gz.

    A file is: two zero bytes, the type (8: bytes), the number of dimensions, each dimension as a big-endian 32-bit
    number, and the elements, the last dimension innermost.

    Args:
        path: of the file.
        dimensions: how many are expected.

    Returns:
        uint8, of the shape in the header, none of whose dimensions is 0.

    Raises:
        ValueError: the file is no IDX file, has another type or number of dimensions, is empty, or its length does not
            agree with its header.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "labels-idx1-ubyte")
        ...     _ = path.write_bytes(bytes([0, 0, UINT8, 1]) + bytes([0, 0, 0, 3]) + bytes([7, 8, 9]))
        ...     read_idx(path, dimensions=1)
        tensor([7, 8, 9], dtype=torch.uint8)
    """
    expected = f"IDX of bytes in {dimensions} dimension{'s' if dimensions > 1 else ''}"
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise damaged(path, f"cannot be decompressed ({error})", f"{expected}, gzipped") from error
    start = 4 + 4 * dimensions
    magic = bytes([0, 0, UINT8, dimensions])
    if content[:4] != magic or len(content) < start:
        raise damaged(
            path, f"begins with {content[:4].hex() or 'nothing'}", f"{expected}, beginning with {magic.hex()}"
        )
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    if 0 in shape or len(content) != start + math.prod(shape):
        sizes = "x".join(map(str, shape))
        raise damaged(path, f"says {sizes} and has {len(content)} bytes", f"{start} + {sizes} bytes, more than {start}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).view(shape)
