"""Partitioned models on several ranks by torch.distributed, sending only gradients of the partition that learns.

Every rank constructs the same model, chunks and trainer from the same seeds:

    dist.init_process_group()
    model = partnets.partition(network, (0.8, 0.1, 0.1))
    partnets.distributed.Trainer(model, partnets.chunk(data, (0.8, 0.1, 0.1)), batch_size=256).fit(1000)
"""

from partnets.distributed.checkpoint import OptimizerState, load, save
from partnets.distributed.ddp import DDP
from partnets.distributed.fsdp import fully_shard
from partnets.distributed.shared_chunks import share
from partnets.distributed.trainer import Trainer

__all__ = ["DDP", "OptimizerState", "Trainer", "fully_shard", "load", "save", "share"]
