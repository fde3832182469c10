"""The backends: which there are, which one runs, and why.

A backend is a module with a function for each operator (see operators). This is the only place that knows them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
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
        automatic: 'auto' may choose it.
    """

    name: str
    status: Callable[[], str]
    devices: frozenset[str] | None = None
    dtypes: frozenset[torch.dtype] | None = None
    automatic: bool = True

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


def _load(backend: str) -> str:
    """Loads a backend's library; READY, or why it doesn't load and the cure."""
    path = build_info.library(backend)
    if path is None:
        cure = f"reinstall partkernels with PARTKERNELS_BUILD={backend}"
        return build_info.facts().get(backend, f"not built: {cure} to see why")
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return (
            f"{path} does not load ({error}); it was built with {build_info.facts()} and this is torch"
            f" {torch.__version__}: reinstall partkernels"
        )
    return READY


@cache
def _cpu_status() -> str:
    return _load("cpu")


@cache
def _cuda_status() -> str:
    status = _load("cuda")
    if status != READY:
        return status
    built = build_info.facts()["cuda"]
    if torch.version.cuda is None or not torch.cuda.is_available():
        return f"{built}; no GPU, or PyTorch was built without CUDA"
    major, minor = torch.cuda.get_device_capability()
    served = [tuple(divmod(int(number), 10)) for number in re.findall(r"sm_(\d+)", built)]
    newer = [divmod(int(number), 10) for number in re.findall(r"PTX (\d+)", built)]
    if any(major == m and minor >= n for m, n in served) or any((major, minor) >= each for each in newer):
        return READY
    return (
        f"{built}, and {torch.cuda.get_device_name()} has compute capability {major}.{minor}; from 8.0 on, reinstall"
        f" partkernels with PARTKERNELS_BUILD=cuda and TORCH_CUDA_ARCH_LIST={major}.{minor}, else use triton or"
        " reference"
    )


_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def triton_device() -> str:
    """The type of device that the Triton backend serves: 'cuda', or 'cpu' where TRITON_INTERPRET=1."""
    return "cpu" if _INTERPRETED else "cuda"


@cache
def _triton_status() -> str:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    if _INTERPRETED:
        return READY
    if not torch.cuda.is_available():
        return "no GPU, or PyTorch was built without CUDA; on a CPU, TRITON_INTERPRET=1 runs the kernels slowly"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return f"{torch.cuda.get_device_name()} is older than compute capability 8.0: use the reference backend"
    return READY


# In the order in which 'auto' prefers them.
_BACKENDS = {
    backend.name: backend
    for backend in (
        # Not for 'auto' until it was measured on a GPU.
        Backend(
            "cuda",
            _cuda_status,
            devices=frozenset({"cuda"}),
            dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
            automatic=False,
        ),
        Backend(
            "triton",
            _triton_status,
            devices=frozenset({triton_device()}),
            dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
            automatic=not _INTERPRETED,
        ),
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
        reason = _BACKENDS[name].obstacle(device_type, dtype)
        if reason is not None:
            raise RuntimeError(_cannot(name, reason))
        return _BACKENDS[name].module()
    reasons = {}
    for backend in _BACKENDS.values():
        if not backend.automatic:
            continue
        reason = backend.obstacle(device_type, dtype)
        if reason is None:
            break
        if backend.devices is None or device_type in backend.devices:
            reasons[backend.name] = reason
    if backend.name == "reference":
        _warn_of_reference(device_type, "; ".join(f"{other}: {why}" for other, why in reasons.items()))
    return backend.module()


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
        backend = module.__name__.removeprefix("partkernels.")
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
    return _BACKENDS["reference" if requested() == "reference" or _cpu_status() != READY else "cpu"].module()


def maker(device: torch.device) -> ModuleType:
    """The module that makes defaults on a device: that of its kernels, or the reference if there is none."""
    if device.type == "cpu":
        return host()
    is_served = device.type == triton_device() and requested() != "reference" and _triton_status() == READY
    return _BACKENDS["triton" if is_served else "reference"].module()
