"""Registration of operators with torch.library: schema, fake kernel, dispatch to a backend.

Every operator takes a partition's arguments, followed by the name of a backend. Its kernel gets that backend's module
from `dispatch` and calls the function with the operator's name there, without the last argument.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _is_any_autocast_enabled
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from partkernels.backend import dispatch
from partkernels.operators.memory import meeting, no_view

_library = torch.library.Library("partkernels", "DEF")
# Namespaces of backends with compiled libraries, which may be loaded later or never and register only kernels.
_compiled = [
    torch.library.Library(backend.namespace, "FRAGMENT") for backend in dispatch.BACKENDS.values() if backend.namespace
]

# The order of Partition.flat().
PARTITION = "Tensor map, Tensor? stored, int count, str kind, float step, int seed, int stream, int row, int col"
# The partition's arguments that a weight's gradient needs: owners without defaults.
OWNERS = "Tensor map, int count"

# The function that calls each operator from Python, and its kernel.
calls: dict[str, Callable[..., Any]] = {}
_kernels: dict[str, Callable] = {}


def define(
    name: str, arguments: str, fake: Callable[..., Tensor], kernel: Callable[..., Tensor] | None = None
) -> Callable[..., Tensor]:
    """Register partkernels::name with these arguments and a trailing backend; return the function that calls it.

    The kernel is the backend's function of this name, unless another kernel is given. `fake` makes the empty output.
    """
    if kernel is None:
        define_for_libraries(f"{name}({arguments}) -> Tensor")
    _kernels[name] = kernel = kernel or _kernel(name, arguments)
    _register(f"{name}({arguments}, str backend) -> Tensor", kernel, fake)
    calls[name] = _call(name, kernel)
    return calls[name]


def define_in_place(name: str, arguments: str) -> Callable[..., None]:
    """Register an operator that returns nothing and writes to the arguments marked in its schema; see define.

    Gradients do not pass through it. Written tensors must not share memory with its other tensors. All tensors of a
    list must have one device and dtype.
    """
    define_for_libraries(f"{name}({arguments}) -> ()")
    kernel, tensors, written = _kernel(name, arguments), _tensors(arguments), _written(arguments)

    def kernel_that_is_seen(*args):
        _check_apart(args, tensors, written)
        kernel(*args)
        # Backends write without autograd's knowledge; report the change in case autograd saved the tensor.
        increment_version([tensor for i in written for tensor in _each(args[i]) if not tensor.is_inference()])

    _register(f"{name}({arguments}, str backend) -> ()", kernel_that_is_seen, lambda *_: None)
    call = _call(name, kernel_that_is_seen)

    def call_without_grad(*args):
        if torch.is_grad_enabled():
            with torch.no_grad():
                return call(*args)
        return call(*args)

    calls[name] = call_without_grad
    return call_without_grad


def define_for_libraries(schema: str) -> None:
    """Define an operator of the compiled libraries, which register its kernels when they are loaded."""
    for library in _compiled:
        library.define(schema.replace("SymInt", "int"))


def _register(schema: str, kernel: Callable, fake: Callable) -> None:
    name = _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"partkernels::{name}", fake, lib=_library)


def _operator(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.partkernels, name).default


def _tensors(arguments: str) -> dict[int, str]:
    """Return the position and singular name of each schema argument that is a tensor or a list of tensors."""
    named = (argument.split(" ") for argument in arguments.split(", "))
    return {
        i: name.removesuffix("s") if kind.endswith("[]") else name
        for i, (kind, name) in enumerate(named)
        if kind.startswith("Tensor")
    }


def _written(arguments: str) -> list[int]:
    return [i for i, argument in enumerate(arguments.split(", ")) if "!" in argument]


def _kernel(name: str, arguments: str) -> Callable:
    """Return a kernel that calls the function of this name in the backend given by the last argument."""
    tensors, written = list(_tensors(arguments)), _written(arguments)
    lists = {i for i, argument in enumerate(arguments.split(", ")) if "[]" in argument.split(" ")[0]}

    def kernel(*args):
        for i in tensors:
            if i in lists:
                if any(map(Tensor.is_neg, _each(args[i]))):
                    return resolved(*args)
            elif args[i] is not None and args[i].is_neg():
                return resolved(*args)
        first = args[0][0] if 0 in lists else args[0]
        backend = dispatch.choose(args[-1], first.device, first.dtype)
        dispatch.note(name, backend, args[-1], first)
        result = getattr(backend, name)(*args[:-1])
        return result if result is None else no_view(result)

    def resolved(*args):
        # Backends read memory, in which a negated view, such as z.conj().imag, is not negated yet.
        plain = [_resolved(arg) for arg in args]
        result = kernel(*plain)
        for i in written:
            for given, used in zip(_each(args[i]), _each(plain[i]), strict=True):
                if used is not given:
                    given.copy_(used)
        return result

    return kernel


def _each(argument: Tensor | list[Tensor | None] | None) -> list[Tensor]:
    """Return the tensors of an argument: itself, or those in a list."""
    if isinstance(argument, Tensor):
        return [argument]
    return [] if argument is None else [tensor for tensor in argument if tensor is not None]


def _resolved(argument: object) -> object:
    if isinstance(argument, Tensor):
        return argument.resolve_neg()
    return [_resolved(one) for one in argument] if isinstance(argument, list | tuple) else argument


def _check_apart(args: tuple, tensors: dict[int, str], written: list[int]) -> None:
    """Raise ValueError if a written tensor shares memory with another tensor."""
    named = [(i, tensor) for i in tensors for tensor in _each(args[i])]
    for one, other in meeting([tensor for _, tensor in named]):
        i, j = named[one][0], named[other][0]
        if i in written or j in written:
            raise ValueError(
                f"{tensors[i]} and {tensors[j]} share memory, and a step writes to it; pass separate tensors, such as"
                " torch.zeros_like(parameter)."
            )


def _call(name: str, kernel: Callable) -> Callable:
    """Return a function that calls the operator or, where equivalent, directly its kernel and autograd function.

    The operator's registration and return to Python take 15 us, or 100 us with a gradient or after a convolution, which
    leaves the caches cold.
    """
    operator = _operator(name)
    # Without a partition's tensors, which have the weight's type and no gradient.
    tensors = [
        i
        for i, argument in enumerate(operator._schema.arguments)
        if "Tensor" in str(argument.type) and argument.name not in ("map", "maps", "stored")
    ]

    def call(*args):
        if torch.compiler.is_compiling() or (name in _autocast and _is_any_autocast_enabled()):
            return operator(*args)
        if is_transformed():
            return _functions[name].apply(*args) if name in _functions else operator(*args)
        is_learning, requires_grad = torch.is_grad_enabled(), False
        for i in tensors:
            tensor = args[i]
            if type(tensor) is list:
                if not {*map(type, tensor)} <= PLAIN or any(map(_is_meta, tensor)):
                    return operator(*args)
            elif tensor is not None:
                if type(tensor) not in PLAIN:
                    return operator(*args)
                requires_grad = requires_grad or (is_learning and tensor.requires_grad)
        if type(args[0]) is not list and args[0].is_meta:
            return operator(*args)
        if requires_grad:
            # Function.apply first looks for transforms, which are not active here: 7 us.
            return super(torch.autograd.Function, _functions[name]).apply(*args)
        return kernel(*args)

    return call


_is_meta = attrgetter("is_meta")
# Other types are subclasses, which may override operators.
PLAIN = {Tensor, torch.nn.Parameter}
_autocast: set[str] = set()
_functions: dict[str, type[torch.autograd.Function]] = {}


def is_transformed() -> bool:
    """Return whether torch.func's transforms or forward-mode AD are active; their tensors may look plain."""
    return _are_functorch_transforms_active() or forward_ad._current_level >= 0


def differentiate(name: str, setup_context: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """Register the gradient of partkernels::name, and a vmap that calls it for each example in turn."""

    def vmap(info, in_dims, *args):
        examples = [
            [arg.select(dim, i) if isinstance(dim, int) else arg for arg, dim in zip(args, in_dims, strict=True)]
            for i in range(info.batch_size)
        ]
        return torch.stack([calls[name](*example) for example in examples]), 0

    torch.library.register_autograd(f"partkernels::{name}", backward, setup_context=setup_context, lib=_library)
    torch.library.register_vmap(f"partkernels::{name}", vmap, lib=_library)
    # An autograd.Function of the same kernel, for tensors that need no dispatch and for torch.func: torch.library's
    # gradient does not support torch.func.grad and sets tangents to 0.
    members = {"forward": _kernels[name], "setup_context": setup_context, "backward": backward, "vmap": vmap}
    _functions[name] = type(
        name, (torch.autograd.Function,), {key: staticmethod(value) for key, value in members.items()}
    )


def is_wanted(ctx: Any, place: int) -> bool:
    """Return whether this backward pass needs the gradient of an operator's tensor 0 or 1.

    ctx.needs_input_grad covers any pass, but torch.autograd.grad(y, x) does not need a weight's gradient, which costs
    as much as x's.
    """
    try:
        node = ctx.next_functions[place][0]
        return node is not None and torch._C._will_engine_execute_node(node)
    except (AttributeError, RuntimeError):
        return True  # no engine, as in torch.func; or a leaf given to torch.autograd.grad


def autocast(name: str) -> None:
    """Cast floating-point arguments to torch.autocast's dtype when enabled, as autocast does for torch's operators."""
    _autocast.add(name)
    for device in ("cpu", "cuda"):

        def kernel(*args, device=device):
            dtype = torch.get_autocast_dtype(device)
            cast = [arg.to(dtype) if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args]
            with torch.autocast(device, enabled=False):
                return getattr(torch.ops.partkernels, name)(*cast)

        _library.impl(name, kernel, f"Autocast{device.upper()}")
