"""traced: a module's evaluation mode as a torch.fx graph that needs only torch."""

from __future__ import annotations

import copy
import inspect

import torch
from torch import Tensor, fx, nn

from partnets.hyper.learned import Learned

CURE = "give its class a to_ordinary() that returns a torch.nn module with the same output in evaluation mode"


def traced(module: nn.Module) -> fx.GraphModule:
    """Return a torch.fx.GraphModule that computes this module's evaluation mode, with its numbers as buffers.

    Only torch is needed to pickle it, and for torch.export, torch.jit and ONNX: it contains no class of partnets.
    torch.nn layers in the module are kept as layers, frozen.

    Raises:
        ValueError: forward draws random numbers, or branches on the values, the shape or the type of its input.

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
    if asked:  # they return something else for torch.fx's proxies than for tensors
        raise ValueError(f"forward of this {kind} calls {' and '.join(sorted(asked))}, which cannot be traced; {CURE}.")
    try:
        module = _without_optional_arguments(module)
        first, second = _graph_module(module), _graph_module(module)
    except Exception as error:  # forward may be user code, and torch.fx calls it with proxies instead of tensors
        raise ValueError(f"torch.fx cannot trace this {kind} ({error}); {CURE}.") from error
    # A number drawn during tracing differs in the second trace. Numbers drawn at each call are nodes of the graph.
    constants = zip(first.buffers(), second.buffers(), strict=True)
    if (
        first.code != second.code
        or not all(torch.equal(*pair) for pair in constants)
        or any(map(_is_random, first.graph.nodes))
    ):
        raise ValueError(f"this {kind} draws random numbers in evaluation; {CURE}.")
    return first


def _without_optional_arguments(module: nn.Module) -> nn.Module:
    """Return the module with a forward of required arguments only, as torch.fx passes proxies for optional ones."""
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
    """A module around a single Learned, which traces as a constant only if a parent calls it."""

    def __init__(self, value: Learned) -> None:
        super().__init__()
        self.value = value

    def forward(self) -> Tensor:
        return self.value()


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def call_module(self, m, forward, args, kwargs):
        if isinstance(m, Learned):  # trace its value as a constant, not its parametrisation
            return self.create_proxy("get_attr", self.path_of_module(m), (), {})
        return super().call_module(m, forward, args, kwargs)


def _graph_module(module: nn.Module) -> fx.GraphModule:
    graph = fx.Graph()  # a new graph without a reference to the tracer, which pickling would include
    graph.output(graph.graph_copy(_Tracer().trace(module), {}))
    for node in graph.nodes:
        node.type = None  # string annotations cannot be pickled
    paths = [node.target for node in graph.nodes if node.op in ("get_attr", "call_module")]
    used = {path: _attribute(module, path) for path in paths}
    new = fx.GraphModule(used, graph, type(module).__name__)
    for path in paths:
        owner, _, name = path.rpartition(".")
        if name in module.get_submodule(owner)._non_persistent_buffers_set:
            new.get_submodule(owner)._non_persistent_buffers_set.add(name)
    return new


def _attribute(module: nn.Module, path: str) -> nn.Module | Tensor:
    """Return a submodule, or a copy of the value of a hyper.Learned, a parameter or a buffer."""
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
    return tagged or "dropout" in name or name == "gumbel_softmax"  # functions that torch.ops.aten does not have
