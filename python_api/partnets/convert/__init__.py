"""Dense models become partitioned ones, in place, and dense ones again."""

from partnets.convert.finalizing import finalize
from partnets.subnetworks.merging import merge
from partnets.subnetworks.partitioning import partition, without_rule

__all__ = ["finalize", "merge", "partition", "without_rule"]
