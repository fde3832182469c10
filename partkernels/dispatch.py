"""The backends: which there are, which one runs, and why.

A backend is a module with a function for each operator (see operators). This is the only place that knows them.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch

from partkernels import build_info

READY = "ready"


@dataclass(frozen=True)
class Backend:
    """One implementation of the operators.

    Attributes:
        status: READY, or why it cannot run here and the cure.
        devices, dtypes: what it serves; None for everything.
    """

    name: str
    status: Callable[[], str]
    devices: frozenset[str] | None = None
    dtypes: frozenset[torch.dtype] | None = None

    def module(self) -> ModuleType:
        return importlib.import_module(f"partkernels.{self.name}")

    def obstacle(self, device_type: str, dtype: torch.dtype | None) -> str | None:
        """Why this backend cannot serve such tensors, or None."""
        if self.status() != READY:
            return self.status()
        if self.devices is not None and device_type not in self.devices:
            return f"it runs on {', '.join(sorted(self.devices))} and the tensors are on {device_type}"
        if self.dtypes is not None and dtype is not None and dtype not in self.dtypes:
            return f"it serves {', '.join(sorted(map(str, self.dtypes)))} and the tensors are {dtype}"
        return None


@cache
def _cpu_status() -> str:
    path = build_info.library("cpu")
    if path is None:
        return build_info.facts().get("cpu", "not built: reinstall partkernels with PARTKERNELS_BUILD=cpu to see why")
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return (
            f"{path} does not load ({error}); it was built with {build_info.facts()} and this is torch"
            f" {torch.__version__}: reinstall partkernels"
        )
    return READY


def _absent() -> str:
    return "not in this version"


# In the order in which 'auto' prefers them.
_BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("cuda", _absent, devices=frozenset({"cuda"})),
        Backend("triton", _absent, devices=frozenset({"cuda"})),
        Backend(
            "cpu",
            _cpu_status,
            devices=frozenset({"cpu"}),
            dtypes=frozenset({torch.float32, torch.float64, torch.bfloat16}),
        ),
        Backend("reference", lambda: READY),
    )
}


def backends() -> dict[str, str]:
    """Each backend's name and 'ready', or why it cannot run here.

    Example:
        >>> backends()["reference"]
        'ready'
    """
    return {name: _BACKENDS[name].status() for name in reversed(_BACKENDS)}


def _check_name(name: str, source: str) -> None:
    if name != "auto" and name not in _BACKENDS:
        names = ", ".join(sorted(_BACKENDS))
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
    if name != "auto" and _BACKENDS[name].status() != READY:
        raise RuntimeError(_cannot(name, _BACKENDS[name].status()))
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
        stacklevel=5,
    )


def choose(name: str, device: torch.device, dtype: torch.dtype | None = None) -> ModuleType:
    """The module that runs an operator on such tensors, for a backend's name or 'auto'.

    Raises:
        RuntimeError: the named backend cannot serve these tensors.
    """
    return _choose(name, device.type, dtype)


@cache  # every call of an operator asks
def _choose(name: str, device_type: str, dtype: torch.dtype | None) -> ModuleType:
    if name != "auto":
        reason = _BACKENDS[name].obstacle(device_type, dtype)
        if reason is not None:
            raise RuntimeError(_cannot(name, reason))
        return _BACKENDS[name].module()
    reasons = {}
    for backend in _BACKENDS.values():
        reason = backend.obstacle(device_type, dtype)
        if reason is None:
            break
        if backend.devices is None or device_type in backend.devices:
            reasons[backend.name] = reason
    if backend.name == "reference":
        _warn_of_reference(device_type, "; ".join(f"{other}: {why}" for other, why in reasons.items()))
    return backend.module()


def host() -> ModuleType:
    """The module that makes maps and defaults on the CPU: C++ if it was built, unless the reference is asked for."""
    return _BACKENDS["reference" if requested() == "reference" or _cpu_status() != READY else "cpu"].module()
