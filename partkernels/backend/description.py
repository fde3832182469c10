"""Backend: what a backend says of itself in its folder."""

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
        name: of its folder.
        status: READY, or why it cannot run here and the cure.
        rank: 'auto' prefers the highest of those that serve the tensors.
        devices, dtypes: what it serves; None for everything.
        automatic: 'auto' may choose it.
        namespace: of torch.ops, in which its compiled library registers kernels; None if it has none. The operators'
            schemas are defined there, without the trailing backend: see partkernels.operators.registration.
        makes_maps: it has random_map, on the CPU.
        makes_defaults: its subnetwork_weight also draws the defaults of a weight, on its devices.
        planned: which of linear's 'forward', 'grad_input' and 'grad_weight' have a choice of partkernels.backend.plan.
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
        """Why this backend cannot serve such tensors, or None."""
        if not self.is_ready:
            return self.status()
        if self.devices is not None and device_type not in self.devices:
            return f"it runs on {', '.join(sorted(self.devices))} and the tensors are on {device_type}"
        if self.dtypes is not None and dtype is not None and dtype not in self.dtypes:
            return f"it serves {', '.join(sorted(map(str, self.dtypes)))} and the tensors are {dtype}"
        return None


def load_library(backend: str) -> str:
    """Loads the compiled library of a backend; READY, or why it doesn't load and the cure."""
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
