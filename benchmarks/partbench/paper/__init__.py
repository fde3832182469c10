"""The paper's experiments, one command each, on data that are here: python -m partbench.paper --help.

recipes, methods    how networks are trained, and what is compared
experiment          what an experiment is; every other module with a class that is `registered` is one
runs, report        trainings that survive an interruption; what is kept of them, and the documentation's page
"""

import importlib
import pkgutil

from partbench import needing

with needing("paper"):
    for _module in pkgutil.iter_modules(__path__):
        if _module.name != "__main__":
            importlib.import_module(f"{__name__}.{_module.name}")
