"""Which backend runs an operator, and why."""

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
    """What each folder beside this module says of itself, in the order in which 'auto' prefers them."""
    folders = [module.name for module in pkgutil.iter_modules(_folder.__path__) if module.ispkg]
    described = [importlib.import_module(f"{_folder.__name__}.{name}").BACKEND for name in folders]
    return {backend.name: backend for backend in sorted(described, key=lambda backend: -backend.rank)}


BACKENDS = _found()


def backends() -> dict[str, str]:
    """Each backend's name and 'ready', or why it cannot run here.

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

# What use_backend leaves with torch, which hands it on to threads that run backward passes.
_HANDED_ON = "partkernels.use_backend"


class _Thread(threading.local):
    """What the present thread asks for, and notes of it; None outside of use_backend, and of noting."""

    def __init__(self) -> None:
        # Of the instance: the compiler guards on what it finds there, and would overlook what comes before the class's.
        self.requested: str | None = None
        self.notes: list[str] | None = None


_thread = _Thread()


def requested() -> str:
    """The backend that use_backend or PARTKERNELS_BACKEND asks for; 'auto' if neither does."""
    name = _thread.requested
    if name is None and not torch.compiler.is_compiling():
        name = handed_on(_HANDED_ON)
    return _of_process if name is None else name


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Runs the operators that are called inside, and their gradients, on one backend.

    It holds in the thread that enters it, and in the backward passes that this thread starts.

    Args:
        name: 'reference', 'cpu', 'triton', 'cuda' or 'auto'.

    Raises:
        ValueError: there is no such backend.
        RuntimeError: it cannot run here; the message says why, and the cure.

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


@cache  # every call of an operator asks
def choose(name: str, device: torch.device, dtype: torch.dtype | None = None) -> ModuleType:
    """The module that runs an operator on such tensors, for a backend's name or 'auto'.

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
    """What ran inside, a line for each operator: see explain."""
    previous, _thread.notes = _thread.notes, []
    try:
        yield _thread.notes
    finally:
        _thread.notes = previous


def note(operator: str, module: ModuleType, name: str, tensor: torch.Tensor) -> None:
    """Notes which backend runs an operator for such tensors, and why: `name` was asked for."""
    if _thread.notes is not None:
        backend = module.__name__.split(".")[-2]
        why = (
            "asked for"
            if name != "auto"
            else (f"automatic: of the backends that serve {tensor.dtype} on {tensor.device.type}, the first")
        )
        _thread.notes.append(f"{operator}: {backend} ({why})")


def note_torch(operator: str, how: str) -> None:
    """Notes an operator that no backend runs, since PyTorch's own serve."""
    if _thread.notes is not None:
        _thread.notes.append(f"{operator}: {how}")


def note_plan(plan: str) -> None:
    """Adds to the note of the operator that is running how its backend computes it."""
    if _thread.notes:
        _thread.notes[-1] += f"; {plan}"


def host() -> ModuleType:
    """The module that makes maps on the CPU: C++ if it was built, unless the reference is asked for."""
    return _first(lambda backend: backend.makes_maps)


def maker(device: torch.device) -> ModuleType:
    """The module that makes defaults on a device: that of its kernels, or the reference if there is none."""
    return _first(lambda backend: backend.makes_defaults and (not backend.devices or device.type in backend.devices))


def _first(serves: Callable[[Backend], bool]) -> ModuleType:
    """Of the backends that are ready and serve, the first; the reference if that is asked for."""
    if requested() == "reference":
        return BACKENDS["reference"].operators()
    return next(backend for backend in BACKENDS.values() if serves(backend) and backend.is_ready).operators()
