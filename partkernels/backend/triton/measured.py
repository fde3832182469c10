"""The fastest measured plans: files shipped with the library, and one file of measurements on this machine.

Each file has one GPU's measurements: a list of {product, sizes, config (null: rebuild), microseconds by plan}. A
measurement applies to sizes within a factor of two. Nothing is measured outside of `tuning`.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

SHIPPED = Path(__file__).parent / "measured"


class Found(NamedTuple):
    """A measured plan; config is None for 'rebuild'."""

    config: tuple[int, int, int, int] | None
    reason: str


def folder() -> Path:
    """Return the folder of this machine's measurements: $PARTKERNELS_CACHE, or partkernels in the user's cache."""
    if chosen := os.environ.get("PARTKERNELS_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "partkernels"


def _file_name(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


def _kind(product) -> dict:
    return {
        "dtype": str(product.dtype).removeprefix("torch."),
        "bits": product.bits,
        "defaults": product.kind,
        "tf32": product.tf32,
    }


def _sizes(product) -> list[int]:
    return [product.down, product.across, product.depth]


def _read(path: Path) -> list[dict]:
    """Return a file's records; empty if it is missing, damaged or foreign, so that products are measured again."""
    try:
        records = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    fields = {"product", "sizes", "config", "microseconds"}
    return (
        records
        if isinstance(records, list) and all(isinstance(r, dict) and r.keys() == fields for r in records)
        else []
    )


@cache
def _records(gpu: str) -> list[tuple[dict, str]]:
    own, shipped = folder() / _file_name(gpu), SHIPPED / _file_name(gpu)
    sources = (own, f"measured on this {gpu}"), (shipped, f"measured on a {gpu}")
    return [(record, reason) for path, reason in sources for record in _read(path)]


def read_again() -> None:
    """Clear cached records, after the files or their folder changed."""
    _records.cache_clear()
    nearest.cache_clear()


@cache  # every product calls this
def nearest(product: Any) -> Found | None:
    """Return the fastest plan measured at the nearest sizes within a factor of two, or None."""
    best, found = 1.0, None
    for record, reason in _records(product.gpu.name):
        if record["product"] != _kind(product):
            continue
        distance = max(abs(math.log2(a / b)) for a, b in zip(record["sizes"], _sizes(product), strict=True))
        if distance < best or (distance == best and found is None):
            times = ", ".join(f"{plan} {time:g} us" for plan, time in record["microseconds"].items())
            config = record["config"] and tuple(record["config"])
            best, found = distance, Found(config, f"{reason} at {'x'.join(map(str, record['sizes']))}: {times}")
    return found


def is_known(product: Any) -> bool:
    """Return whether this machine has measured exactly these sizes."""
    own = _read(folder() / _file_name(product.gpu.name))
    return any(record["product"] == _kind(product) and record["sizes"] == _sizes(product) for record in own)


def remember(product: Any, config: tuple[int, int, int, int] | None, microseconds: dict[str, float]) -> None:
    """Add a measurement to this machine's file, which is replaced atomically."""
    path = folder() / _file_name(product.gpu.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"product": _kind(product), "sizes": _sizes(product), "config": config, "microseconds": microseconds}
    others = [r for r in _read(path) if (r["product"], r["sizes"]) != (record["product"], record["sizes"])]
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".json", delete=False) as file:
        file.write("[\n" + ",\n".join(json.dumps(r) for r in [*others, record]) + "\n]\n")
    os.replace(file.name, path)
    read_again()
