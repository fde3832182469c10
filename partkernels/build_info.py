"""What setup.py built, and with what: facts that it leaves beside the package."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent


@cache
def facts() -> dict[str, str]:
    """Names and values as setup.py wrote them: torch, compiler, flags, and for each backend 'built' or why not."""
    path = FOLDER / "build_info.json"
    return json.loads(path.read_text()) if path.exists() else {}


def library(backend: str) -> Path | None:
    """The compiled library of a backend, or None. One of which nothing is known is what an interrupted build left."""
    if not facts().get(backend, "").startswith("built"):
        return None
    found = sorted(FOLDER.glob(f"_{backend}.*"))
    return found[0] if found else None
