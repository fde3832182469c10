"""fully_shard: torch's FSDP for a partitioned model; each rank keeps a part of every weight."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

from partnets.distributed.consistency import check_agreement, partitions
from partnets.hyper import hyperparameters
from partnets.nn.partitioned import partitioned_layers
from partnets.utils.modules import is_sharded


def fully_shard(model: nn.Module, units: Iterable[nn.Module] | None = None, **options) -> nn.Module:
    """Apply torch.distributed.fsdp.fully_shard to a partitioned model, in place.

    Weights, gradients and moments are sharded along their first dimension, and each rank steps its shard. Every rank
    keeps whole maps, 2 bits a weight for three or four partitions. Parameters that are read outside of their layer's
    forward, such as those of modules without a rule, and ψ are not sharded; all ranks average their gradients. ψ must
    be able to stop requiring gradients in steps of the weights, which torch's sharded parameters cannot. Construct the
    optimiser afterwards, as for torch's fully_shard.

    Args:
        model: a partitioned model, the same on all ranks.
        units: the modules to gather at once, inner ones first; each partitioned layer if None. Parameters outside of
            them are gathered with the model.
        options: further options of torch's fully_shard.

    Returns:
        The model.

    Raises:
        ValueError: the ranks' partitions or parameters differ, or the model is sharded already; and torch's errors.

    Example:
        >>> import torch, partnets
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1,))
        >>> model = fully_shard(partnets.partition(nn.Sequential(nn.Linear(4, 3)), (0.5, 0.5)), mesh=mesh)
        >>> optimizer = partnets.optim.Adam(model)
        >>> with partnets.subnetwork(model, active=1, update=1):
        ...     model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step(update=1)
        >>> model[0].weight.placements
        (Shard(dim=0),)
        >>> dist.destroy_process_group()
    """
    if sharded := [name for name, parameter in model.named_parameters() if is_sharded(parameter)]:
        raise ValueError(
            f"{sharded[0]} is sharded already; call fully_shard once, on the whole model, and pass the modules to"
            " gather at once as units=."
        )
    check_agreement(partitions(model) | dict(model.named_parameters()))  # torch shards each rank's own copy
    layers, mesh = [layer for _, layer in partitioned_layers(model)], options.get("mesh")
    # torch gathers parameters only for their own layer's forward.
    read = [parameter for layer in layers if layer.is_read for _, parameter in layer.owned()]
    whole = [*hyperparameters(model), *read]
    inner_first = [layer for layer in reversed(layers) if not layer.is_read]
    units = _tied(inner_first) if units is None else list(units)
    for unit in [*units, *([] if model in units or [model] in units else [model])]:
        fsdp.fully_shard(unit, ignored_params=set(whole), **options)
    average = functools.partial(_average, [None] if mesh is None else mesh.get_all_groups())
    for parameter in whole:
        parameter.register_post_accumulate_grad_hook(average)
    return model


def _tied(layers: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Group layers that share a parameter, which torch gathers once for all of them."""
    groups: dict[nn.Parameter | nn.Module, list[nn.Module]] = {}
    for layer in layers:
        own = list(layer.parameters(recurse=False)) or [layer]
        group = next((groups[parameter] for parameter in own if parameter in groups), [])
        group.append(layer)
        groups |= dict.fromkeys(own, group)
    return list({id(group): group for group in groups.values()}.values())


def _average(groups: list[dist.ProcessGroup | None], parameter: nn.Parameter) -> None:
    for group in groups:
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)
