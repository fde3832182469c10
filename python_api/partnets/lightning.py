"""PartitionedModule, by its short name; see partnets.integrations.lightning."""

from partnets.integrations.lightning import PartitionedModule

__all__ = ["PartitionedModule"]
