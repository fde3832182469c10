"""docs/private-names.md lists the private names of other libraries that the packages use."""

import ast
import re
from pathlib import Path

from torch import nn

ROOT = Path(__file__).parents[1]
FILES = [*ROOT.glob("partkernels/**/*.py"), *ROOT.glob("python_api/partnets/**/*.py")]
PRIVATE = re.compile(r"_[A-Za-z]\w*")


def test_page_lists_each_private_name_and_no_other():
    used, ours, texts = set(), set(), ""
    for path in FILES:
        texts += (text := path.read_text())
        nodes = [*ast.walk(ast.parse(text))]
        used |= {name for node in nodes for name in _uses(node)}
        ours |= {name for node in nodes for name in _definitions(node)}
    listed = {*re.findall(r"`(_[A-Za-z]\w*)`", (ROOT / "docs/private-names.md").read_text())}
    assert used - ours - listed == set()
    assert {name for name in listed if not re.search(rf"\b{name}\b", texts)} == set()


def _uses(node):
    """Return the private names of an attribute, of an import or of a call of getattr or hasattr."""
    if isinstance(node, ast.Attribute):
        names = [node.attr]
    elif isinstance(node, ast.ImportFrom) and not node.module.startswith(("partkernels", "partnets")):
        names = [*node.module.split("."), *(alias.name for alias in node.names)]
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
        names = [part.value for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    else:
        return []
    return [name for name in names if PRIVATE.fullmatch(name)]


def _definitions(node):
    """Return the names that our code defines; those of every nn.Module are PyTorch's."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        names = [node.name]
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        names = [node.attr]
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        names = [node.id]
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setdefault":
        names = [part.value for part in node.args if isinstance(part, ast.Constant)]
    elif isinstance(node, ast.Dict):  # of attributes to set
        names = [key.value for key in node.keys if isinstance(key, ast.Constant)]
    else:
        return []
    return [name for name in names if name not in vars(nn.Module())]
