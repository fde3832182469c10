"""Optimisers that step one partition at a time, with moments and step counts for each (Appendix I.1).

SGD, Adam and AdamW do it in one pass over the weight; PerPartition makes it of torch.optim's others.
"""

from partnets.optim.base import PartitionedOptimizer
from partnets.optim.fused import SGD, Adam, AdamW
from partnets.optim.per_partition import PerPartition
from partnets.optim.weight_decay import decays

__all__ = ["SGD", "Adam", "AdamW", "PartitionedOptimizer", "PerPartition", "decays"]
