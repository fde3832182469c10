"""Which parameters of its children a module reads by itself, as F.linear(x, self.proj.weight) does."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import textwrap
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

# What these give of a parameter is the same for all subnetworks.
SHAPELY = {"device", "dim", "dtype", "is_cuda", "itemsize", "ndim", "numel", "requires_grad", "shape", "size", "stride"}
# What ends as torch's methods that write do, and writes no values.
HARMLESS = {"requires_grad_", "retain_grad_", "__init__"}
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


def written_by(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that this module's forward, or a method that it calls, writes, by path: self.weight.clamp_(0)."""
    found = {}
    for chain in sorted(_writes(type(module))):
        inner = [module]
        for i, step in enumerate(chain):
            found |= {
                ".".join(chain[: i + 1]): one._parameters[step]
                for one in inner
                if one._parameters.get(step) is not None
            }
            inner = [child for one in inner for child in _children(one, step)]
    return found


def globals_of(function: types.FunctionType) -> list[Any]:
    """The values of the global variables that a function, or one that is defined in it, reads.

    Example:
        >>> globals_of(read_by) == [_reads, _children]
        True
    """
    codes, names = [function.__code__], {}
    for code in codes:
        codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
        read = [one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
        names |= dict.fromkeys(read)
    return [function.__globals__[name] for name in names if name in function.__globals__]


@functools.cache
def _reads(cls: type[nn.Module]) -> frozenset[tuple[str, ...]]:
    """The attributes of attributes, ("a", "b", "weight"), that forward and the methods which it calls read."""
    return frozenset(chain for tree in _sources(cls) for chain in _chains(tree) if len(chain) > 1)


@functools.cache
def _writes(cls: type[nn.Module]) -> frozenset[tuple[str, ...]]:
    """What they write in place: ("weight", "data") of self.weight.data = ..., ("weight",) of self.weight.clamp_(0)."""
    nodes = [node for tree in _sources(cls) for node in ast.walk(tree)]
    targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    targets = [target for target in targets if isinstance(target, ast.Attribute | ast.Subscript)]
    written = [_chain(target) for target in targets if _chain(target)[-1:] in (("data",), (EACH,))]
    written += [_chain(node.target) for node in nodes if isinstance(node, ast.AugAssign)]
    called = [node.func for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    written += [_chain(func.value) for func in called if func.attr.endswith("_") and func.attr not in HARMLESS]
    return frozenset(written) - {()}


@functools.cache
def _sources(cls: type[nn.Module]) -> list[ast.AST]:
    """What is known of the source of forward and of the methods and properties that it names."""
    found, seen, names = [], set(), ["forward"]
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        for owner in (one for one in cls.__mro__ if not one.__module__.startswith("torch.")):
            function = vars(owner).get(name)
            try:
                tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(function, "fget", function))))
            except (OSError, SyntaxError, TypeError):
                continue
            found.append(tree)
            names += [chain[0] for chain in _chains(tree) if len(chain) == 1]
    return found


def _chains(tree: ast.AST) -> Iterator[tuple[str, ...]]:
    """What follows `self` in the source of a function, unless only its shape or dtype is asked for."""
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
