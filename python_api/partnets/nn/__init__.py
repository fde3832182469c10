"""torch.nn's layers with partitioned parameters, for code that swaps one class for another, and layers of FixUp."""

from partnets.nn.fixup import Bias, Scale
from partnets.subnetworks.layers import *  # noqa: F403
from partnets.subnetworks.layers import LAYERS

__all__ = ["Bias", "Scale", *LAYERS]
