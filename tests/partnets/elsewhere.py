"""An emulated device that computes on the CPU and, like a GPU, rejects operations that mix its tensors with the CPU's.

Code that mixes devices fails on it as on a GPU. PyTorch's C++ code sees these tensors on the meta device, the only
device without memory.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

KIND = "privateuseone"
DEVICE = torch.device(KIND, 0)
aten = torch.ops.aten
# Operators that accept CPU tensors on a GPU too: as indices, or as the source of a copy.
_TAKE_OTHERS = {
    aten.copy_.default, aten._to_copy.default, aten.index.Tensor, aten.index_put.default, aten.index_put_.default,
    aten._index_put_impl_.default,
}  # fmt: skip


class Elsewhere(Tensor):
    """A tensor on DEVICE with the entries of the CPU tensor `here`."""

    __slots__ = ["here"]

    @staticmethod
    def __new__(cls, here: Tensor) -> Elsewhere:
        sizes = {"strides": here.stride(), "storage_offset": here.storage_offset(), "dtype": here.dtype}
        return Tensor._make_wrapper_subclass(cls, here.shape, **sizes, device="meta")

    def __init__(self, here: Tensor) -> None:
        self.here = here

    @property
    def device(self) -> torch.device:
        return DEVICE

    @property
    def is_meta(self) -> bool:
        return False

    def tolist(self) -> list:
        return self.here.tolist()

    def data_ptr(self) -> int:
        return self.here.data_ptr()

    def cpu(self) -> Tensor:
        return self.to("cpu")

    def __deepcopy__(self, memo: dict) -> Elsewhere:
        if id(self) not in memo:
            copied = Elsewhere(self.here.detach().clone())
            is_parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if is_parameter else copied
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return _run(operator, args, kwargs or {})


def _run(operator: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = [leaf for leaf in leaves if isinstance(leaf, Elsewhere)]
    others = [leaf for leaf in leaves if not isinstance(leaf, Elsewhere) and leaf.dim()]
    fits = operator is aten.copy_.default or (operator in _TAKE_OTHERS and isinstance(args[0], Elsewhere))
    if there and others and not fits:
        raise RuntimeError(f"{operator}: expected all tensors to be on the same device, but found {DEVICE} and cpu")
    asked = kwargs.get("device")
    if operator is aten.copy_.default:
        is_there = isinstance(args[0], Elsewhere)
    elif asked is None:
        is_there = bool(there)
    else:
        is_there = torch.device(asked).type in ({KIND, "meta"} if there else {KIND})
    args_here, kwargs_here = tree_map(lambda leaf: leaf.here if isinstance(leaf, Elsewhere) else leaf, (args, kwargs))
    result = operator(*args_here, **kwargs_here | ({} if asked is None else {"device": torch.device("cpu")}))
    if not is_there:
        return result
    result = tree_map(lambda leaf: Elsewhere(leaf) if isinstance(leaf, Tensor) else leaf, result)
    return return_and_correct_aliasing(operator, args, kwargs, result)


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return _run(operator, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Functions that PyTorch's C++ code handles before it dispatches."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == KIND:
            return Elsewhere(torch.tensor(*args, **kwargs | {"device": "cpu"}))
        if function in (Tensor.to, Tensor.type_as) and len(args) > 1 and isinstance(args[1], Tensor):
            return args[0].to(device=args[1].device, dtype=args[1].dtype)
        return function(*args, **kwargs)


@contextmanager
def elsewhere() -> Iterator[None]:
    """Emulate the device within the context."""
    module = types.ModuleType(f"torch.{KIND}")
    module._is_in_bad_fork, module._lazy_init, module.is_available = (lambda: False), (lambda: None), (lambda: True)
    module.current_device, module.device_count = (lambda: 0), (lambda: 1)
    module.manual_seed_all = module.set_rng_state = lambda *_: None
    module.get_rng_state = lambda _=None: torch.get_rng_state()
    torch._register_device_module(KIND, module)
    try:
        with _Functions(), _Dispatch():
            yield
    finally:
        delattr(torch, KIND)
        del sys.modules[f"torch.{KIND}"]


def put(model: nn.Module) -> nn.Module:
    """Move a model to the emulated device, in place."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module._parameters[name] = nn.Parameter(Elsewhere(parameter.detach()), parameter.requires_grad)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = Elsewhere(buffer)
    return model
