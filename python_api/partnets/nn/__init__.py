"""torch.nn's layers with partitioned parameters, for code that swaps one class for another, and layers of FixUp."""

from partnets.nn.fixup import Bias, Scale
from partnets.subnetworks import layers
from partnets.subnetworks.layers import *  # noqa: F403

__all__ = ["Bias", "Scale"]
__all__ += layers.__all__
