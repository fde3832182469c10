"""Where modules were before version 0.2, by which pickled models and older programs name them."""

import importlib
import sys
from types import ModuleType

MOVED = {
    "plan": "backend.plan",
    "dispatch": "backend.dispatch",
    "explain": "explanation",
    "packed_map": "formats.packed_map",
    "philox": "formats.philox",
    "cpu": "backend.cpu.operators",
    "cuda": "backend.cuda.operators",
    "reference": "backend.reference.operators",
    "triton": "backend.triton.operators",
    "linear": "operators.linear",
    "conv2d": "operators.conv",
    "conv_transpose2d": "operators.conv_transpose",
    "embedding": "operators.embedding",
    "subnetwork_weight": "operators.subnetwork_weight",
    "optimizers": "operators.optimizers",
}


class _Moved(ModuleType):
    """A module by its old name, whose contents are looked up where they are now."""

    def __init__(self, old: str, new: str) -> None:
        super().__init__(old)
        self.__dict__["_new"] = new

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._new), name)


def alias(package: str, moved: dict[str, str]) -> None:
    """Makes modules of a package importable by their old names."""
    for old, new in moved.items():
        sys.modules[f"{package}.{old}"] = _Moved(f"{package}.{old}", f"{package}.{new}")


alias("partkernels", MOVED)
