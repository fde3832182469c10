"""torch.nn's layers with partitioned parameters, for code that swaps one class for another."""

from partnets.subnetworks.layers import *  # noqa: F403
from partnets.subnetworks.layers import LAYERS

__all__ = list(LAYERS)
