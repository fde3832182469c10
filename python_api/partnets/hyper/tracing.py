"""traced: what a module computes in evaluation mode, as a module of torch alone."""

from __future__ import annotations

import copy
import inspect

import torch
from torch import Tensor, fx, nn

from partnets.hyper.learned import Learned

CURE = "give its class a to_ordinary() that returns a module of torch which computes the same in evaluation mode"


def traced(module: nn.Module) -> fx.GraphModule:
    """A torch.fx.GraphModule that computes what this module does in evaluation mode, its numbers as buffers.

    It needs torch alone: pickling, torch.export, torch.jit and ONNX find no class of ours in it. Layers of torch.nn in
    the module stay layers, frozen.

    Raises:
        ValueError: forward draws random numbers, or decides by the values, the shape or the type of its input what it
            does.

    Example:
        >>> from partnets import hyper
        >>> class Scale(hyper.Hyperparameter):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.factor = hyper.Learned(2.0, hyper.positive)
        ...     def forward(self, x):
        ...         return x * self.factor()
        >>> plain = traced(Scale())
        >>> plain(torch.ones(2)), dict(plain.state_dict())
        (tensor([2., 2.]), {'factor': tensor(2.)})
    """
    kind = type(module).__name__
    module = _Value(module) if isinstance(module, Learned) else module
    module = copy.deepcopy(module).eval().requires_grad_(False)
    asked = {"isinstance", "hasattr"} & set(getattr(getattr(type(module).forward, "__code__", None), "co_names", ()))
    if asked:  # of torch.fx's stand-ins they say another thing than of tensors
        raise ValueError(f"forward of this {kind} calls {' and '.join(sorted(asked))}, which no trace follows; {CURE}.")
    try:
        module = _without_optional_arguments(module)
        first, second = _graph_module(module), _graph_module(module)
    except Exception as error:  # forward is anybody's, and gets torch.fx's stand-ins for tensors
        raise ValueError(f"torch.fx cannot trace this {kind} ({error}); {CURE}.") from error
    # A number that was drawn while tracing differs the second time; others are drawn at each call.
    constants = zip(first.buffers(), second.buffers(), strict=True)
    if (
        first.code != second.code
        or not all(torch.equal(*pair) for pair in constants)
        or any(map(_is_random, first.graph.nodes))
    ):
        raise ValueError(f"this {kind} draws random numbers in evaluation; {CURE}.")
    return first


def _without_optional_arguments(module: nn.Module) -> nn.Module:
    """The module as one whose forward takes what it must: of the rest torch.fx's stand-ins are never None."""
    cls = type(module)
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    if not any(each.default is not each.empty for each in parameters):
        return module
    if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters):
        return module
    needed = ", ".join(each.name for each in parameters if each.default is each.empty)
    made: dict = {"whole": cls.forward}
    exec(f"def forward(self, {needed}):\n    return whole(self, {needed})", made)  # torch.fx counts a code's arguments
    module.__class__ = type(cls.__name__, (cls,), {"forward": made["forward"]})
    return module


class _Value(nn.Module):
    """For a Learned alone, whose value is a constant only where it is called."""

    def __init__(self, value: Learned) -> None:
        super().__init__()
        self.value = value

    def forward(self) -> Tensor:
        return self.value()


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def call_module(self, m, forward, args, kwargs):
        if isinstance(m, Learned):  # its value is what counts, not how it is parametrised
            return self.create_proxy("get_attr", self.path_of_module(m), (), {})
        return super().call_module(m, forward, args, kwargs)


def _graph_module(module: nn.Module) -> fx.GraphModule:
    graph = fx.Graph()  # one without a tracer, which a pickle would name
    graph.output(graph.graph_copy(_Tracer().trace(module), {}))
    for node in graph.nodes:
        node.type = None  # annotations, which cannot be pickled where they are strings
    paths = [node.target for node in graph.nodes if node.op in ("get_attr", "call_module")]
    used = {path: _attribute(module, path) for path in paths}
    new = fx.GraphModule(used, graph, type(module).__name__)
    for path in paths:
        owner, _, name = path.rpartition(".")
        if name in module.get_submodule(owner)._non_persistent_buffers_set:
            new.get_submodule(owner)._non_persistent_buffers_set.add(name)
    return new


def _attribute(module: nn.Module, path: str) -> nn.Module | Tensor:
    """A module, or the value of a hyper.Learned, a parameter or a buffer."""
    owner, _, name = path.rpartition(".")
    found = getattr(module.get_submodule(owner), name)
    if isinstance(found, Learned):
        found = found()
    return found.detach().clone() if isinstance(found, Tensor) else found


def _is_random(node: fx.Node) -> bool:
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if node.op not in ("call_function", "call_method") or node.kwargs.get("training") is False:
        return False
    overloads = getattr(torch.ops.aten, name, None)
    tagged = overloads is not None and any(
        torch.Tag.nondeterministic_seeded in getattr(overloads, each).tags for each in overloads.overloads()
    )
    return tagged or "dropout" in name or name == "gumbel_softmax"  # those that torch.ops.aten has not
