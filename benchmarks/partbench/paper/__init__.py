"""The paper's experiments, one command each, on local data: python -m partbench.paper --help.

recipes, methods    the training of networks, and the compared methods
experiment          the base class; every other module with a `registered` class is an experiment
runs, report        trainings that survive an interruption; their results, and the documentation's pages
"""

import importlib
import pkgutil

from partbench import needing

with needing("paper"):
    for _module in pkgutil.iter_modules(__path__):
        if _module.name != "__main__":
            importlib.import_module(f"{__name__}.{_module.name}")
