"""Optimisers that step one partition at a time, with moments and step counts for each (Appendix I.1).

SGD, Adam and AdamW step in one pass over a weight; PerPartition wraps other optimisers of torch.optim.
"""

from partnets.optim.base import PartitionedOptimizer
from partnets.optim.per_partition import PerPartition
from partnets.optim.sgd_adam import SGD, Adam, AdamW
from partnets.optim.weight_decay import decays

__all__ = ["SGD", "Adam", "AdamW", "PartitionedOptimizer", "PerPartition", "decays"]
