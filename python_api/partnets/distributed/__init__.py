"""Partitioned models on several ranks by torch.distributed, sending only gradients of the partition that learns.

Every rank constructs the same model, chunks and trainer from the same seeds:

    dist.init_process_group()
    model = partnets.partition(network, (0.8, 0.1, 0.1))
    ddp = partnets.distributed.DDP(model)
"""

from partnets.distributed.checkpoint import load, save
from partnets.distributed.collectives import averaged
from partnets.distributed.consistency import check_agreement
from partnets.distributed.ddp import DDP
from partnets.distributed.fsdp import fully_shard
from partnets.distributed.optimizer_state import OptimizerState
from partnets.distributed.packing import Packing, all_reduce_packed
from partnets.distributed.shared_chunks import SharedChunks, share
from partnets.distributed.shared_draw import draw
from partnets.distributed.trainer import Trainer

__all__ = [
    "DDP",
    "OptimizerState",
    "Packing",
    "SharedChunks",
    "Trainer",
    "all_reduce_packed",
    "averaged",
    "check_agreement",
    "draw",
    "fully_shard",
    "load",
    "save",
    "share",
]
