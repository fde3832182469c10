"""Ordinary models become partitioned ones, in place, and ordinary ones again."""

from partnets.convert.explaining import explain_partition
from partnets.convert.finalizing import finalize
from partnets.convert.finding import without_rule
from partnets.convert.merging import merge
from partnets.convert.partitioning import partition
from partnets.convert.reassigning import reassign

__all__ = ["explain_partition", "finalize", "merge", "partition", "reassign", "without_rule"]
