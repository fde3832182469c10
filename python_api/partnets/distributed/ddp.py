"""DDP: torch's DistributedDataParallel for a partitioned model, sending the gradient of one partition."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from partnets.distributed.packing import Packing
from partnets.distributed.ranks import SAME, check_agreement, check_outside, own_buffers, partitions

# torch's attribute for the names of buffers that it leaves alone. It would send those of rank 0 in every forward pass,
# and write them into the other ranks' inside of partnets.subnetwork.
_IGNORED = "_ddp_params_and_buffers_to_ignore"
# Options of DistributedDataParallel that callers must leave out; the last one needs another communication hook.
SET = {"find_unused_parameters": True, "gradient_as_bucket_view": True, "static_graph": False, "mixed_precision": None}


class DDP(nn.parallel.DistributedDataParallel):
    """torch.nn.parallel.DistributedDataParallel for a partitioned model, sending only trained entries' gradients.

    A step of partition k sends the gradient of w_k, and a step of ψ that of ψ, each with a few numbers that identify
    it; torch adds an int32 for each parameter tensor, to record which were used. partnets.subnetwork accepts the
    wrapped model and this one; optimisers take the wrapped model. All ranks must run the same subnetworks in the same
    order, with k drawn from generators in the same state. If ranks train different partitions with gradients of the
    same size, the backward pass raises ValueError on all ranks; with different sizes it fails as in torch. Gradients of
    several batches, such as with no_sync, follow torch's rules.

    Args:
        module: a partitioned model, the same on all ranks.
        options: options of DistributedDataParallel, except find_unused_parameters (trained parameters change from step
            to step), gradient_as_bucket_view and static_graph, which are set here, and mixed_precision, which needs
            another communication hook: use torch.autocast.

    Attributes:
        packing: the communication hook's state; packing.bytes counts the bytes of gradients that this rank has sent.

    Raises:
        ValueError: one of these options is passed, or the ranks' partitions differ; and the errors of
            DistributedDataParallel.
        RuntimeError: the model is inside of partnets.subnetwork.

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

    packing: Packing

    def __init__(self, module: nn.Module, **options: Any) -> None:
        if passed := [name for name in SET if options.get(name) is not None]:
            raise ValueError(
                f"{', '.join(passed)} cannot be passed, as DDP sets it itself; leave it out, and use torch.autocast for"
                " mixed precision."
            )
        check_outside(module)
        check_agreement(partitions(module), options.get("process_group"))
        given = getattr(module, _IGNORED, None)
        leave_buffers_alone(module)
        try:
            super().__init__(module, **options | SET)
        finally:
            delattr(module, _IGNORED) if given is None else setattr(module, _IGNORED, given)
        broadcast_rows(module, self.device, self.process_group)
        pack(self)

    def forward(self, *inputs: Any, **arguments: Any) -> Any:
        if torch.is_grad_enabled():
            expect(self)
        return super().forward(*inputs, **arguments)


def pack(model: nn.Module) -> None:
    """Let a DistributedDataParallel send only trained entries' gradients; call it outside of partnets.subnetwork.

    Call `expect` before each backward pass then. A wrapper with a communication hook of the user's, and other modules,
    are left unchanged.
    """
    if not isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "packing"):
        return
    packing = Packing(model.module, model.process_group)
    try:
        model.register_comm_hook(packing, Packing.reduce)
    except RuntimeError:  # torch takes one hook
        packing = None
    model.packing = packing


def expect(model: nn.Module) -> None:
    """Prepare a backward pass of a model that `pack` was called with."""
    if (packing := getattr(model, "packing", None)) is not None:
        packing.expect()


def leave_buffers_alone(model: nn.Module) -> None:
    """Keep torch's DistributedDataParallel from sending the buffers of partitions in every forward pass."""
    setattr(model, _IGNORED, [*(getattr(model, _IGNORED, None) or ()), *own_buffers(model)])


def broadcast_rows(model: nn.Module, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Set the vectors and statistics of each partition to those of rank 0."""
    for name, buffer in own_buffers(model).items():
        if not name.endswith(tuple(SAME)):
            sent = buffer.to(device)
            dist.broadcast(sent, group=group, group_src=0)
            buffer.copy_(sent)
