"""Facts of the build by setup.py, as recorded in build_info.json beside the package.

Python imports a checkout's package before an installed one if the checkout's root is the current folder. A checkout
without a build uses the library of the installed copy if both have the same C++ sources.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
FACTS = "build_info.json"


def digest(folder: Path, pattern: str = "*") -> str:
    """Return a hash of the names and contents of a folder's files."""
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob(pattern) if path.is_file()):
        content = path.read_bytes()
        found.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return found.hexdigest()[:16]


def copies() -> list[Path]:
    """Return the other importable copies of this package that setup.py built."""
    places = [Path(entry, FOLDER.name) for entry in sys.path]
    # An editable installation is found only through its finder.
    specs = [finder.find_spec(FOLDER.name, None) for finder in sys.meta_path if hasattr(finder, "find_spec")]
    places += [Path(spec.origin).parent for spec in specs if spec and spec.origin]
    return [place for place in places if place.resolve() != FOLDER.resolve() and (place / FACTS).exists()]


@cache
def _found() -> tuple[Path, dict[str, str]]:
    """Return the folder of the build that this package uses, and the build's facts."""
    sources = FOLDER.parent / "csrc"
    if (FOLDER / FACTS).exists():
        return FOLDER, _read(FOLDER / FACTS)
    if not sources.is_dir():
        return FOLDER, {}
    others, own = copies(), digest(sources)
    for other in others:
        facts = _read(other / FACTS)
        if facts.get("sources") == own:
            return other, facts
    cure = f"run `pip install --no-build-isolation --editable .` in {FOLDER.parent}"
    reason = f"not built: partkernels is imported from the checkout {FOLDER.parent}, which has no build"
    if others:
        reason += f" and hides the one in {others[0]}, whose C++ sources differ"
        cure = f"run Python from another folder, or {cure}"
    return FOLDER, dict.fromkeys(("cpu", "cuda"), f"{reason}; {cure}")


def _read(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            raise ValueError("expected an object with strings as values")
    except ValueError as error:
        raise ImportError(f"{path} is damaged ({error}); reinstall partkernels.") from error
    return found


def facts() -> dict[str, str]:
    """Return setup.py's records: torch, compiler, flags, and for each backend 'built' or why it was not built."""
    return _found()[1]


def folder() -> Path:
    """Return the folder of the compiled libraries."""
    return _found()[0]


def library(backend: str) -> Path | None:
    """Return a backend's compiled library; None if its build is not recorded, as after an interrupted build."""
    if not facts().get(backend, "").startswith("built"):
        return None
    found = sorted(folder().glob(f"_{backend}.*"))
    return found[0] if found else None


def check_companion(package: Path) -> None:
    """Warn if a package came with another version of partkernels and the Python code differs.

    Args:
        package: the folder of partnets. The partkernels that came with it is beside it where it is installed, and one
            folder higher in a checkout.
    """
    own = [place.resolve() for place in (package.parent / FOLDER.name, package.parents[1] / FOLDER.name)]
    other = next((place for place in own if (place / "__init__.py").exists()), FOLDER.resolve())
    if other != FOLDER.resolve() and digest(other, "*.py") != digest(FOLDER, "*.py"):
        warnings.warn(
            f"{package.name} is imported from {package} and partkernels from {FOLDER}, which differs from the"
            f" {other} that came with it. Run Python from another folder, or reinstall.",
            stacklevel=3,
        )
