"""The layers, torch's with partitioned parameters, and the rules that they share.

Every file of this folder is imported here, but for those that need other libraries; their layers are this package's.
"""

import importlib
import pkgutil

from partnets.nn.layer import PartitionedLayer
from partnets.nn.registry import FOREIGN

__all__ = ["PartitionedLayer"]

for _file in pkgutil.iter_modules(__path__, f"{__name__}."):
    if _file.name not in FOREIGN.values():
        _module = importlib.import_module(_file.name)
        for _name, _layer in vars(_module).items():
            if getattr(_layer, "__module__", None) == _file.name and hasattr(_layer, "ordinary"):
                globals()[_name] = _layer
                __all__ += [_name]
