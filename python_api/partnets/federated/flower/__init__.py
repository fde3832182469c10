"""Federated partitioned networks with Flower: in one process, in its simulation, or over a network.

Requires the extra `federated`, which installs Flower, and Python 3.11 or later.
"""

import os
import warnings

# Flower reads these at import; they keep it from sending telemetry.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # Flower's command line imports deprecated names from click
    try:
        import flwr.clientapp
        import flwr.serverapp  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "partnets.federated.flower needs Flower: pip install 'partkernels[federated]', with Python 3.11 or later."
        ) from error

from partnets.federated.flower.app import client_app
from partnets.federated.flower.local_grid import LocalGrid
from partnets.federated.flower.strategy import PartitionedFedAvg

__all__ = ["LocalGrid", "PartitionedFedAvg", "client_app"]
