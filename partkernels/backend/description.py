"""Backend: the description of a backend that its folder provides."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from partkernels import build_info

READY = "ready"


@dataclass(frozen=True)
class Backend:
    """One implementation of the operators.

    Attributes:
        name: the folder's name.
        status: returns READY, or why the backend cannot run here and how to fix it.
        rank: 'auto' prefers the highest rank among the backends that serve the tensors.
        devices, dtypes: the supported ones; None for all.
        automatic: whether 'auto' may choose it.
        namespace: the torch.ops namespace in which its compiled library registers kernels, or None. The operators'
            schemas are defined there, without the trailing backend: see partkernels.operators.registration.
        makes_maps: whether it has random_map, on the CPU.
        makes_defaults: whether its subnetwork_weight also draws a weight's defaults, on its devices.
        planned: those of linear's 'forward', 'grad_input' and 'grad_weight' that can follow partkernels.backend.plan.
    """

    name: str
    status: Callable[[], str]
    rank: int
    devices: frozenset[str] | None = None
    dtypes: frozenset[torch.dtype] | None = None
    automatic: bool = True
    namespace: str | None = None
    makes_maps: bool = False
    makes_defaults: bool = False
    planned: frozenset[str] = frozenset()

    @property
    def is_ready(self) -> bool:
        return self.status() == READY

    def operators(self) -> ModuleType:
        return importlib.import_module(f"partkernels.backend.{self.name}.operators")

    def obstacle(self, device_type: str, dtype: torch.dtype | None) -> str | None:
        """Return why this backend cannot serve such tensors, or None."""
        if not self.is_ready:
            return self.status()
        if self.devices is not None and device_type not in self.devices:
            return f"it runs on {', '.join(sorted(self.devices))} and the tensors are on {device_type}"
        if self.dtypes is not None and dtype is not None and dtype not in self.dtypes:
            return f"it serves {', '.join(sorted(map(str, self.dtypes)))} and the tensors are {dtype}"
        return None


def load_library(backend: str) -> str:
    """Load a backend's compiled library; return READY, or why it does not load and how to fix it."""
    path = build_info.library(backend)
    if path is None:
        cure = f"reinstall partkernels with PARTKERNELS_BUILD={backend}"
        found = build_info.facts().get(backend, f"not built: {cure} to see why")
        missing = f"{build_info.folder()}/_{backend}.*, which was built, is missing; reinstall partkernels"
        return missing if found.startswith("built") else found
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return (
            f"{path} does not load ({error}); it was built with {build_info.facts()} and this is torch"
            f" {torch.__version__}: reinstall partkernels"
        )
    return READY
