"""Which parameters of its children a module reads by itself, as F.linear(x, self.proj.weight) does."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator

from torch import nn

# What these give of a parameter is the same for all subnetworks.
SHAPELY = {"device", "dim", "dtype", "is_cuda", "itemsize", "ndim", "numel", "requires_grad", "shape", "size", "stride"}
# Stands for all children of a container that is indexed.
EACH = "*"


def read_by(module: nn.Module) -> set[nn.Module]:
    """The modules inside of which this module's forward, or a method that it calls, reads a parameter.

    It is told from the source of methods and properties, `self.a.b.weight` and no other way; without a source there are
    none. torch's own modules are left out: what they read is the business of the layers that replace their children.

    Example:
        >>> from transformers.models.beit.modeling_beit import BeitConfig, BeitModel
        >>> read_by(nn.Sequential(nn.Linear(4, 4)))
        set()
    """
    found = set()
    for *path, name in _reads(type(module)):
        inner = [module]
        for step in path:
            inner = [child for one in inner for child in _children(one, step)]
        found.update(one for one in inner if one is not module and one._parameters.get(name) is not None)
    return found


def _children(module: nn.Module, step: str) -> list[nn.Module]:
    children = module._modules.values() if step == EACH else [module._modules.get(step)]
    return [child for child in children if child is not None]


@functools.cache
def _reads(cls: type[nn.Module]) -> frozenset[tuple[str, ...]]:
    """The attributes of attributes, ("a", "b", "weight"), that forward and the methods which it calls read."""
    found, seen, names = set(), set(), ["forward"]
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        for owner in (one for one in cls.__mro__ if not one.__module__.startswith("torch.")):
            for chain in _chains(vars(owner).get(name)):
                names += chain[:1] if len(chain) == 1 else []
                found |= {chain} if len(chain) > 1 else set()
    return frozenset(found)


def _chains(function: object) -> Iterator[tuple[str, ...]]:
    """What follows `self` in the source of a function, unless only its shape or dtype is asked for."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(function, "fget", function))))
    except (OSError, SyntaxError, TypeError):
        return
    ignored = set()
    for node in ast.walk(tree):  # outer nodes before those inside
        if isinstance(node, ast.Attribute) and node.attr in SHAPELY:
            ignored.add(node.value)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
            ignored.add(node.left)
        if isinstance(node, ast.Attribute) and node not in ignored and (chain := _chain(node)):
            yield chain


def _chain(node: ast.expr) -> tuple[str, ...]:
    """("a", "*", "weight") of self.a[0].weight; () of what does not begin with self."""
    names = []
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
        elif isinstance(node, ast.Subscript):
            names.append(EACH)
        else:
            return ()
        node = node.value
    return tuple(reversed(names)) if node.id == "self" else ()
