"""How an operator is registered with torch.library: schema, fake, dispatch to a backend.

Every operator takes the arguments of a partition and ends in a backend's name. Its kernel asks `dispatch` for the
module of that name and calls the function of the operator's own name there, without the last argument.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _is_any_autocast_enabled
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from partkernels.backend import dispatch
from partkernels.operators.memory import meeting, no_view

_library = torch.library.Library("partkernels", "DEF")
# Of the backends with compiled libraries, which may be loaded later, or never: what they register are kernels alone.
_compiled = [
    torch.library.Library(backend.namespace, "FRAGMENT") for backend in dispatch.BACKENDS.values() if backend.namespace
]

# The order of Partition.flat().
PARTITION = "Tensor map, Tensor? stored, int count, str kind, float step, int seed, int stream, int row, int col"
# What a weight's gradient needs of it: its owners, not its defaults.
OWNERS = "Tensor map, int count"

# Each operator as our own code calls it, and what runs in the end.
calls: dict[str, Callable] = {}
_kernels: dict[str, Callable] = {}


def define(
    name: str, arguments: str, fake: Callable[..., Tensor], kernel: Callable[..., Tensor] | None = None
) -> Callable[..., Tensor]:
    """Registers partkernels::name with these arguments and a trailing backend; returns the way to call it.

    What runs is the backend's function of this name, or a kernel that calls another operator. `fake` makes the empty
    output.
    """
    if kernel is None:
        _define_for_libraries(f"{name}({arguments}) -> Tensor")
    _kernels[name] = kernel = kernel or _kernel(name, arguments)
    _register(f"{name}({arguments}, str backend) -> Tensor", kernel, fake)
    calls[name] = _call(name, kernel)
    return calls[name]


def define_in_place(name: str, arguments: str) -> Callable[..., None]:
    """As define, for an operator that returns nothing and writes into those arguments that are marked in its schema.

    Gradients don't pass through it. What it writes must share no memory with its other tensors. Of lists of tensors all
    are on one device and of one dtype.
    """
    _define_for_libraries(f"{name}({arguments}) -> ()")
    kernel, tensors, written = _kernel(name, arguments), _tensors(arguments), _written(arguments)

    def kernel_that_is_seen(*args):
        _check_apart(args, tensors, written)
        kernel(*args)
        # Backends write behind autograd's back; it must know that what it saved has changed.
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


def _define_for_libraries(schema: str) -> None:
    for library in _compiled:
        library.define(schema.replace("SymInt", "int"))


def _register(schema: str, kernel: Callable, fake: Callable) -> None:
    name = _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"partkernels::{name}", fake, lib=_library)


def _operator(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.partkernels, name).default


def _tensors(arguments: str) -> dict[int, str]:
    """The places of those of a schema's arguments that are tensors, or lists of them, and the name of one."""
    named = (argument.split(" ") for argument in arguments.split(", "))
    return {
        i: name.removesuffix("s") if kind.endswith("[]") else name
        for i, (kind, name) in enumerate(named)
        if kind.startswith("Tensor")
    }


def _written(arguments: str) -> list[int]:
    return [i for i, argument in enumerate(arguments.split(", ")) if "!" in argument]


def _kernel(name: str, arguments: str) -> Callable:
    """Calls the function of this name of the backend that the last argument asks for."""
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
        # A backend reads memory, where a negated view (of z.conj().imag) has the numbers before it was negated.
        plain = [_resolved(arg) for arg in args]
        result = kernel(*plain)
        for i in written:
            for given, used in zip(_each(args[i]), _each(plain[i]), strict=True):
                if used is not given:
                    given.copy_(used)
        return result

    return kernel


def _each(argument: Tensor | list[Tensor | None] | None) -> list[Tensor]:
    """The tensors of an argument: itself, or those in a list."""
    if isinstance(argument, Tensor):
        return [argument]
    return [] if argument is None else [tensor for tensor in argument if tensor is not None]


def _resolved(argument: object) -> object:
    if isinstance(argument, Tensor):
        return argument.resolve_neg()
    return [_resolved(one) for one in argument] if isinstance(argument, list | tuple) else argument


def _check_apart(args: tuple, tensors: dict[int, str], written: list[int]) -> None:
    """Raises ValueError if a tensor that is written shares memory with another one."""
    named = [(i, tensor) for i in tensors for tensor in _each(args[i])]
    for one, other in meeting([tensor for _, tensor in named]):
        i, j = named[one][0], named[other][0]
        if i in written or j in written:
            raise ValueError(
                f"{tensors[i]} and {tensors[j]} share memory, and a step writes into it; pass tensors of their own, as"
                " torch.zeros_like(parameter) is."
            )


def _call(name: str, kernel: Callable) -> Callable:
    """Calls the operator, or, where it would come to the same, its kernel at once, and autograd without a detour.

    The operator's way there leads through its registration and back into Python: 15 us, and 100 with a gradient, or
    after a convolution, which leaves nothing of it in the caches.
    """
    operator = _operator(name)
    # Not those of a partition, which are as plain as the weight is and have no gradient.
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
                if not {*map(type, tensor)} <= _PLAIN or any(map(_is_meta, tensor)):
                    return operator(*args)
            elif tensor is not None:
                if type(tensor) not in _PLAIN:
                    return operator(*args)
                requires_grad = requires_grad or (is_learning and tensor.requires_grad)
        if type(args[0]) is not list and args[0].is_meta:
            return operator(*args)
        if requires_grad:
            # Function.apply itself first looks for transforms, which are not active here: 7 us.
            return super(torch.autograd.Function, _functions[name]).apply(*args)
        return kernel(*args)

    return call


_is_meta = attrgetter("is_meta")
# Others are subclasses, which may give an operator a meaning of their own.
_PLAIN = {Tensor, torch.nn.Parameter}
_autocast: set[str] = set()
_functions: dict[str, type[torch.autograd.Function]] = {}


def is_transformed() -> bool:
    """Inside torch.func's transforms or forward-mode differentiation, whose tensors look like any other."""
    return _are_functorch_transforms_active() or forward_ad._current_level >= 0


def differentiate(name: str, setup_context: Callable, backward: Callable) -> None:
    """Registers the gradient of partkernels::name, and with it that vmap calls it for one example after another."""

    def vmap(info, in_dims, *args):
        examples = [
            [arg.select(dim, i) if isinstance(dim, int) else arg for arg, dim in zip(args, in_dims, strict=True)]
            for i in range(info.batch_size)
        ]
        return torch.stack([calls[name](*example) for example in examples]), 0

    torch.library.register_autograd(f"partkernels::{name}", backward, setup_context=setup_context, lib=_library)
    torch.library.register_vmap(f"partkernels::{name}", vmap, lib=_library)
    # The same around the kernel, for tensors that need no dispatch, and for torch.func: torch.library's gradient does
    # not serve torch.func.grad, and makes tangents 0.
    members = {"forward": _kernels[name], "setup_context": setup_context, "backward": backward, "vmap": vmap}
    _functions[name] = type(
        name, (torch.autograd.Function,), {key: staticmethod(value) for key, value in members.items()}
    )


def is_wanted(ctx, place: int) -> bool:
    """Whether this backward pass needs the gradient of an operator's first tensor, or of its second: places 0 and 1.

    ctx.needs_input_grad says what some pass might need; torch.autograd.grad(y, x) has no use for a weight's gradient,
    which costs as much as x's.
    """
    try:
        node = ctx.next_functions[place][0]
        return node is not None and torch._C._will_engine_execute_node(node)
    except (AttributeError, RuntimeError):
        return True  # without an engine, as in torch.func; or a leaf that torch.autograd.grad is asked for


def autocast(name: str) -> None:
    """Under torch.autocast, casts every floating-point argument to its dtype, as it does for torch's own operator."""
    _autocast.add(name)
    for device in ("cpu", "cuda"):

        def kernel(*args, device=device):
            dtype = torch.get_autocast_dtype(device)
            cast = [arg.to(dtype) if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args]
            with torch.autocast(device, enabled=False):
                return getattr(torch.ops.partkernels, name)(*cast)

        _library.impl(name, kernel, f"Autocast{device.upper()}")
