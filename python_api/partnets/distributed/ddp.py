"""DDP: torch's DistributedDataParallel for a partitioned model; the gradient of one partition travels."""

from __future__ import annotations

import torch
from torch import nn

from partnets.distributed.consistency import check_agreement, partitions
from partnets.distributed.packing import Packing, all_reduce_packed

# Options of DistributedDataParallel that callers leave out, and why.
TAKEN = {
    **dict.fromkeys(
        ("find_unused_parameters", "gradient_as_bucket_view", "static_graph"), "DDP sets it itself; leave it out"
    ),
    "mixed_precision": "there is one communication hook, and DDP has its own; leave it out, and use torch.autocast",
}


class DDP(nn.parallel.DistributedDataParallel):
    """torch.nn.parallel.DistributedDataParallel of a partitioned model: only what learns travels between ranks.

    A step of partition k sends w_k's share of the gradient, a step of ψ that of ψ alone, each with a few numbers that
    say whose it is; DDP itself adds an int32 for each parameter tensor, to know which of them were used.
    partnets.subnetwork works on the wrapped model and on this one; optimisers take the wrapped one. All ranks must run
    the same subnetworks in the same order: draw k alike everywhere, as partnets.distributed.draw does. Where others
    learn, and their gradients have the same size, the backward pass raises ValueError on all ranks; of other sizes the
    ranks fail as torch's do. For gradients of several batches, as for no_sync, torch's rules hold.

    Args:
        module: partitioned, the same on all ranks.
        options: of DistributedDataParallel, but for those that are set here: find_unused_parameters, as which
            parameters learn changes from step to step, gradient_as_bucket_view, and static_graph; and
            mixed_precision, which has a communication hook of its own: use torch.autocast.

    Attributes:
        packing: its `bytes` are those of the gradients that this rank has sent.

    Raises:
        ValueError: an option is one of these, or the ranks' partitions differ; and DistributedDataParallel's own
            errors.

    Example:
        >>> import torch.distributed as dist, partnets
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DDP(partnets.Linear(4, 3, proportions=(0.5, 0.25, 0.25), bias=False, seed=0))
        >>> with partnets.subnetwork(model, active=2, update=2):
        ...     model(torch.ones(2, 4)).sum().backward()
        >>> model.packing.bytes  # 3 of 12 entries
        12
        >>> dist.destroy_process_group()
    """

    def __init__(self, module: nn.Module, **options) -> None:
        for name, why in TAKEN.items():
            if options.get(name) is not None:
                raise ValueError(f"{name}={options[name]!r} cannot be passed: {why}.")
        check_agreement(partitions(module), options.get("process_group"))
        super().__init__(
            module, find_unused_parameters=True, gradient_as_bucket_view=True, static_graph=False, **options
        )
        self.packing = Packing(module, self.process_group)
        self.register_comm_hook(self.packing, all_reduce_packed)

    def forward(self, *inputs, **arguments):
        # The backward pass may run outside of partnets.subnetwork, and then the layers no longer know what learns.
        if torch.is_grad_enabled():
            self.packing.expect()
        return super().forward(*inputs, **arguments)
