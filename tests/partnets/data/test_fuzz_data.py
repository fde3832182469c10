"""Damaged files of data sets: a reader raises with the file's name, or reads all undamaged examples correctly."""

from __future__ import annotations

import resource

import image_files
import pytest
from fuzzing import Draw, number_of, run_cases
from image_files import FOLDERS

from partnets.data import load

# Bytes that a reader may allocate in addition to those for undamaged files of a few kB.
MOST_MEMORY = 300 << 20
OTHERS = (
    b"\0" * 40,
    b"\xff" * 40,
    b"\x1f\x8b\x08\0",
    b"<html>",
    b"\x89PNG\r\n\x1a\n",
    b"%!PS-Adobe-3.0 EPSF-3.0\n",
    b"..",
)


def damaged(draw: Draw, whole: bytes) -> bytes:
    """Flip, set, remove or insert bytes: usually in one place, and often in the header."""
    content = bytearray(whole)
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        at = draw.randrange(min(len(content), draw.choice((4, 20, 1 << 20))) or 1)
        length = draw.choice((1, 1, 4, draw.randrange(1, 200)))
        kind = draw.choice(("flip", "set", "cut", "leave out", "put in", "repeat"))
        if kind == "flip" and content:
            content[at] ^= 1 << draw.randrange(8)
        elif kind == "set" and content:
            content[at] = draw.choice((0, 1, 127, 255, draw.randrange(256)))
        elif kind == "cut":
            del content[at if draw.chance(0.5) else -length :]
        elif kind == "leave out":
            del content[at : at + length]
        elif kind == "put in":
            content[at:at] = draw.choice((*OTHERS, draw.randbytes(length)))
        else:
            content[at:at] = content[at : at + length]
    return bytes(content)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_damaged_file_is_named_or_spoils_nothing_else(name, tmp_path, monkeypatch):
    image_files.write(name, tmp_path, monkeypatch)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    before, memory = load(name, tmp_path), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def case(draw: Draw) -> None:
        path = draw.choice(files)
        whole = path.read_bytes()
        path.write_bytes(content := damaged(draw, whole))
        draw.say(f"{path.relative_to(tmp_path)}: {content[:60]!r}, {len(content)} bytes instead of {len(whole)}")
        try:
            after = load(name, tmp_path)
        except (ValueError, FileNotFoundError) as error:
            # If MNIST's images and labels disagree, the error names both files.
            assert path.name in str(error) or f"{path.parent}/{path.name.split('-')[0]}-*" in str(error), error
        else:
            changed = sum(a != b for a, b in zip(content, whole, strict=False)) + abs(len(content) - len(whole))
            for (x, y), (x_before, y_before) in zip(
                (before.train, before.test), (after.train, after.test), strict=True
            ):
                assert x.shape == x_before.shape and x.dtype == x_before.dtype and y.dtype == y_before.dtype
                assert y.min() >= 0 and y.max() < before.classes
                # A changed byte may change one entry, or one image if it is a JPEG.
                pixels = (x != x_before).flatten(1).any(1).sum() if path.suffix == ".JPEG" else (x != x_before).sum()
                assert pixels <= changed and (y != y_before).sum() <= changed
        finally:
            path.write_bytes(whole)

    run_cases(case, number_of(20, of_calls=0.03))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024 < MOST_MEMORY
