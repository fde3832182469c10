"""Check that the documentation site has an entry for every public name: python tests/site_names.py objects.inv."""

import ast
import sys
import zlib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def public_names() -> set[str]:
    """Return the names of PUBLIC in test_names.py, without importing it."""
    tree = ast.parse((ROOT / "tests" / "test_names.py").read_text())
    values = next(node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "PUBLIC")
    return {f"{module}.{name}" for module, names in ast.literal_eval(values).items() for name in names.split()}


def documented(inventory: Path) -> set[str]:
    """Return the names of Python objects in a Sphinx inventory: four lines of text, then compressed lines."""
    compressed = inventory.read_bytes().split(b"\n", 4)[4]
    entries = (line.split() for line in zlib.decompress(compressed).decode().splitlines())
    return {name for name, role, *_ in entries if role.startswith("py:")}


if __name__ == "__main__":
    names = public_names()
    missing = sorted(names - documented(Path(sys.argv[1])))
    print(f"{len(names)} public names, {len(missing)} without reference: {', '.join(missing)}")
    sys.exit(bool(missing))
