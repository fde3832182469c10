"""How an operator is registered with torch.library: schema, fake, dispatch to a backend.

Every operator takes the arguments of a partition and ends in a backend's name. Its kernel asks `dispatch` for the
module of that name and calls the function of the operator's own name there, without the last argument.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from partkernels import dispatch, outputs
from partkernels.partition import Partition

_library = torch.library.Library("partkernels", "DEF")

# The order of Partition.flat().
PARTITION = "Tensor map, Tensor? stored, int count, str kind, float step, int seed, int stream, int row, int col"
# What a weight's gradient needs of it: its owners, not its defaults.
OWNERS = "Tensor map, int count"

# Each operator as our own code calls it.
calls: dict[str, Callable] = {}


def define(name: str, arguments: str) -> Callable[..., Tensor]:
    """Registers partkernels::name with these arguments and a trailing backend; returns the way to call it."""
    kernel = _kernel(name)
    _register(f"{name}({arguments}, str backend) -> Tensor", kernel, getattr(outputs, name))
    calls[name] = _call(name, kernel)
    return calls[name]


def define_in_place(name: str, arguments: str) -> Callable[..., None]:
    """As define, for an operator that returns nothing and writes into those arguments that are marked in its schema.

    Gradients don't pass through it.
    """
    kernel = _kernel(name)

    def kernel_that_is_seen(*args):
        kernel(*args)
        # Backends write behind autograd's back; it must know that what it saved has changed.
        increment_version([args[i] for i in written if args[i] is not None and not args[i].is_inference()])

    _register(f"{name}({arguments}, str backend) -> ()", kernel_that_is_seen, lambda *_: None)
    written = [i for i, argument in enumerate(_operator(name)._schema.arguments) if argument.is_write]
    call = _call(name, kernel_that_is_seen)

    def call_without_grad(*args):
        if torch.is_grad_enabled():
            with torch.no_grad():
                return call(*args)
        return call(*args)

    calls[name] = call_without_grad
    return call_without_grad


def _register(schema: str, kernel: Callable, fake: Callable) -> None:
    name = _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"partkernels::{name}", fake, lib=_library)


def _operator(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.partkernels, name).default


def _kernel(name: str) -> Callable:
    """Calls the function of this name of the backend that the last argument asks for."""

    def kernel(*args):
        backend = dispatch.choose(args[-1], args[0].device, args[0].dtype)
        dispatch.note(name, backend, args[-1], args[0])
        return getattr(backend, name)(*args[:-1])

    return kernel


def _call(name: str, kernel: Callable) -> Callable:
    """Calls the operator, or, where it would come to the same, its kernel at once.

    The operator's way there leads through autograd's registration and back into Python: 15 us, and 100 after a
    convolution, which leaves nothing of it in the caches.
    """
    operator = _operator(name)
    tensors = [i for i, argument in enumerate(operator._schema.arguments) if "Tensor" in str(argument.type)]

    def call(*args):
        if torch.compiler.is_compiling():
            return operator(*args)
        is_grad_enabled = torch.is_grad_enabled()
        for i in tensors:
            tensor = args[i]
            if tensor is None:
                continue
            if type(tensor) not in _PLAIN or tensor.is_meta or (is_grad_enabled and tensor.requires_grad):
                return operator(*args)
        if name in _autocast and torch.is_autocast_enabled(args[0].device.type):
            return operator(*args)
        return kernel(*args)

    return call


# Others are subclasses, which may give an operator a meaning of their own.
_PLAIN = Tensor, torch.nn.Parameter
_autocast: set[str] = set()


def differentiate(name: str, setup_context: Callable, backward: Callable) -> None:
    """Registers the gradient of partkernels::name."""
    torch.library.register_autograd(f"partkernels::{name}", backward, setup_context=setup_context, lib=_library)


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


class InputError(RuntimeError, ValueError):
    """x or bias does not fit the weight: a ValueError, and a RuntimeError as torch's own operators raise for it."""


def check_live(partition: Partition, active: int, update: int | None) -> None:
    """Raises ValueError unless 1 <= update <= active <= C."""
    count = partition.count
    if isinstance(active, bool) or not isinstance(active, int) or not 1 <= active <= count:
        raise ValueError(f"active={active!r}, but this partition has {count} parts; pass an int in 1..{count}.")
    if update is not None and (isinstance(update, bool) or not isinstance(update, int) or not 1 <= update <= active):
        raise ValueError(
            f"update={update!r} with active={active}; pass an int in 1..{active}, or None for no weight gradient."
        )


def check_weight(weight: Tensor, partition: Partition) -> None:
    """Raises unless the partition was made for a weight like this one."""
    if tuple(weight.shape) != partition.shape:
        raise ValueError(
            f"the weight has shape {tuple(weight.shape)} and its partition {partition.shape}; make the partition with"
            f" Partition.random({tuple(weight.shape)}, ...)."
        )
    if not weight.is_floating_point():
        raise TypeError(f"the weight is {weight.dtype}; pass a floating-point weight.")
    if weight.device != partition.device:
        raise ValueError(
            f"the weight is on {weight.device} and its partition on {partition.device}; move it with"
            f" partition.to('{weight.device}')."
        )
    stored = partition.defaults.stored
    if stored is not None and stored.dtype != weight.dtype:
        raise TypeError(
            f"the stored defaults are {stored.dtype} and the weight is {weight.dtype}; cast them with"
            f" partition.to(dtype={weight.dtype})."
        )


def check_input(name: str, tensor: Tensor, weight: Tensor) -> None:
    """Raises InputError unless a tensor has the weight's device and dtype; under autocast, any dtype will do."""
    if tensor.device != weight.device:
        raise InputError(f"{name} is on {tensor.device} and the weight on {weight.device}; move one of them.")
    if tensor.dtype != weight.dtype and not torch.is_autocast_enabled(weight.device.type):
        raise InputError(f"{name} is {tensor.dtype} and the weight {weight.dtype}; cast one of them.")
