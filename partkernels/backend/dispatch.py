"""Which backend runs an operator, and why."""

from __future__ import annotations

import importlib
import os
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import torch

from partkernels import backend as _folder
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


# Process-wide, as torch.backends' flags are: the compiler can guard on it, and gradients run in other threads.
_requested = os.environ.get("PARTKERNELS_BACKEND", "auto")
_check_name(_requested, "PARTKERNELS_BACKEND")


def requested() -> str:
    """The backend that use_backend or PARTKERNELS_BACKEND asks for; 'auto' if neither does."""
    return _requested


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Runs the operators that are called inside, and their gradients, on one backend.

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
    global _requested
    previous, _requested = _requested, name
    try:
        yield
    finally:
        _requested = previous


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


_notes: list[str] | None = None


@contextmanager
def noting() -> Iterator[list[str]]:
    """What ran inside, a line for each operator: see explain."""
    global _notes
    previous, _notes = _notes, []
    try:
        yield _notes
    finally:
        _notes = previous


def note(operator: str, module: ModuleType, name: str, tensor: torch.Tensor) -> None:
    """Notes which backend runs an operator for such tensors, and why: `name` was asked for."""
    if _notes is not None:
        backend = module.__name__.split(".")[-2]
        why = (
            "asked for"
            if name != "auto"
            else (f"automatic: of the backends that serve {tensor.dtype} on {tensor.device.type}, the first")
        )
        _notes.append(f"{operator}: {backend} ({why})")


def note_plan(plan: str) -> None:
    """Adds to the note of the operator that is running how its backend computes it."""
    if _notes:
        _notes[-1] += f"; {plan}"


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
