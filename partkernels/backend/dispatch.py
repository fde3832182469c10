"""Choice of the backend that runs an operator, and notes that explain it."""

from __future__ import annotations

import importlib
import os
import pkgutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import torch

from partkernels import backend as _folder
from partkernels.autograd_threads import hand_on, handed_on
from partkernels.backend.description import READY, Backend


def _found() -> dict[str, Backend]:
    """Return the backends described by the folders beside this module, in the order in which 'auto' prefers them."""
    folders = [module.name for module in pkgutil.iter_modules(_folder.__path__) if module.ispkg]
    described = [importlib.import_module(f"{_folder.__name__}.{name}").BACKEND for name in folders]
    return {backend.name: backend for backend in sorted(described, key=lambda backend: -backend.rank)}


BACKENDS = _found()


def backends() -> dict[str, str]:
    """Return each backend's name with 'ready', or why it cannot run here.

    Example:
        >>> backends()["reference"]
        'ready'
    """
    return {name: BACKENDS[name].status() for name in reversed(BACKENDS)}


def _check_name(name: str, source: str) -> None:
    if name != "auto" and name not in BACKENDS:
        names = ", ".join(sorted(BACKENDS))
        raise ValueError(f"{source} names the backend {name!r}; known are auto, {names}.")


_of_process = os.environ.get("PARTKERNELS_BACKEND") or "auto"
_check_name(_of_process, "PARTKERNELS_BACKEND")

# The key of use_backend's value in torch, which passes it on to threads that run backward passes.
_HANDED_ON = "partkernels.use_backend"


class _Thread(threading.local):
    """The current thread's requested backend and notes; None outside of use_backend and noting."""

    def __init__(self) -> None:
        # Instance attributes: torch.compile guards on these, but would miss one that later hides a class attribute.
        self.requested: str | None = None
        self.notes: list[str] | None = None


_thread = _Thread()


def requested() -> str:
    """Return the backend that use_backend or PARTKERNELS_BACKEND requests; 'auto' if neither does."""
    name = _thread.requested
    if name is None and not torch.compiler.is_compiling():
        name = handed_on(_HANDED_ON)
    return _of_process if name is None else name


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run the operators called inside the context, and their gradients, on one backend.

    This applies to the thread that enters the context and to the backward passes that it starts.

    Args:
        name: 'reference', 'cpu', 'triton', 'cuda' or 'auto'.

    Raises:
        ValueError: there is no such backend.
        RuntimeError: it cannot run here; the message says why and how to fix it.

    Example:
        >>> with use_backend("reference"):
        ...     requested()
        'reference'
    """
    _check_name(name, "use_backend")
    if name != "auto" and not BACKENDS[name].is_ready:
        raise RuntimeError(_cannot(name, BACKENDS[name].status()))
    previous = _thread.requested
    before = handed_on(_HANDED_ON)
    try:
        hand_on(_HANDED_ON, name)
        _thread.requested = name
        yield
    finally:
        _thread.requested = previous
        hand_on(_HANDED_ON, before)


def _cannot(name: str, reason: str) -> str:
    ready = [other for other, status in backends().items() if status == READY]
    return f"The backend {name!r} cannot run this: {reason}. Ready here: {', '.join(ready)}, auto."


@cache
def _warn_of_reference(device_type: str, reason: str) -> None:
    warnings.warn(
        f"partkernels runs on {device_type} through its reference backend, which is slow and materialises weights:"
        f" {reason}. `python -m partkernels` explains; use_backend('reference') silences this.",
        stacklevel=4,
    )


@cache  # every operator call asks
def choose(name: str, device: torch.device, dtype: torch.dtype | None = None) -> ModuleType:
    """Return the module that runs an operator on such tensors, for a backend's name or 'auto'.

    Raises:
        RuntimeError: the named backend cannot serve these tensors.
    """
    device_type = device.type
    if name != "auto":
        reason = BACKENDS[name].obstacle(device_type, dtype)
        if reason is not None:
            raise RuntimeError(_cannot(name, reason))
        return BACKENDS[name].operators()
    reasons = {}
    for backend in BACKENDS.values():
        if not backend.automatic:
            continue
        reason = backend.obstacle(device_type, dtype)
        if reason is None:
            break
        if backend.devices is None or device_type in backend.devices:
            reasons[backend.name] = reason
    if backend.name == "reference":
        _warn_of_reference(device_type, "; ".join(f"{other}: {why}" for other, why in reasons.items()))
    return backend.operators()


@contextmanager
def noting() -> Iterator[list[str]]:
    """Collect one line for each operator that runs inside the context: see explain."""
    previous, _thread.notes = _thread.notes, []
    try:
        yield _thread.notes
    finally:
        _thread.notes = previous


def note(operator: str, module: ModuleType, name: str, tensor: torch.Tensor) -> None:
    """Note which backend runs an operator for such tensors, and why; `name` is the requested backend."""
    if _thread.notes is not None:
        backend = module.__name__.split(".")[-2]
        why = (
            "asked for"
            if name != "auto"
            else (f"automatic: the first backend that serves {tensor.dtype} on {tensor.device.type}")
        )
        _thread.notes.append(f"{operator}: {backend} ({why})")


def note_torch(operator: str, how: str) -> None:
    """Note an operator that runs as PyTorch's own instead of on a backend."""
    if _thread.notes is not None:
        _thread.notes.append(f"{operator}: {how}")


def note_plan(plan: str) -> None:
    """Append the backend's plan to the note of the operator that is running."""
    if _thread.notes:
        _thread.notes[-1] += f"; {plan}"


def host() -> ModuleType:
    """Return the module that makes maps on the CPU: C++ if built, unless the reference is requested."""
    return _first(lambda backend: backend.makes_maps)


def maker(device: torch.device) -> ModuleType:
    """Return the module that makes defaults on a device: its kernels, otherwise the reference."""
    return _first(lambda backend: backend.makes_defaults and (not backend.devices or device.type in backend.devices))


def _first(serves: Callable[[Backend], bool]) -> ModuleType:
    """Return the first ready backend that qualifies; the reference if that is requested."""
    if requested() == "reference":
        return BACKENDS["reference"].operators()
    return next(backend for backend in BACKENDS.values() if serves(backend) and backend.is_ready).operators()
