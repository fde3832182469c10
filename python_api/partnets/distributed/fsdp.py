"""fully_shard: torch's FSDP for a partitioned model; each rank keeps a part of every weight."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp

from partnets.distributed.from_meta import Initialise, Maker
from partnets.distributed.ranks import check_agreement, check_outside, on_all_ranks, partitions
from partnets.hyper import hyperparameters
from partnets.subnetworks.gradients import watch
from partnets.subnetworks.state import MAP, ROWS, STORED, num_partitions, partitioned_modules, state_of
from partnets.utils.modules import Model, is_sharded
from partnets.utils.shards import local, shard


def fully_shard(
    model: Model,
    units: Iterable[nn.Module] | None = None,
    initialise: Initialise | bool = False,
    **options: Any,
) -> Model:
    """Apply torch.distributed.fsdp.fully_shard to a partitioned model, in place.

    Weights, gradients and moments are sharded along their first dimension, with the maps, 2 bits a weight for three or
    four partitions, and each rank exchanges and steps its shard. Every rank keeps the vectors of biases and norms with
    their moments. ψ is not sharded, as the model has to stop its gradients in steps of the weights, nor
    are scalars; all ranks average their gradients. Construct the optimiser afterwards, as for torch's fully_shard.

    A model may be partitioned under torch.device("meta"), without memory. With `initialise`, its units are made and
    sharded one after another, so that no rank ever has the whole model. Partitions, and what partnets.partition draws
    from its seed, are the same as on other devices; other values are those of `initialise`. Without, call to_empty and
    load a state_dict afterwards.

    Args:
        model: a partitioned model, the same on all ranks.
        units: the modules to gather at once, inner ones first; each partitioned module if None. Parameters outside of
            them are gathered with the model. A module that uses the parameters of another one, without calling it,
            must be a unit that includes it, as each nn.MultiheadAttention is by default.
        initialise: True calls reset_parameters() of each module with parameters or buffers on the meta device in it,
            inner ones first; a function, such as `_init_weights` of a model of transformers, is called with each of
            them. Together the calls must set all of these, and may not write into other units.
        options: further options of torch's fully_shard.

    Returns:
        The model.

    Raises:
        ValueError: the model has no partitions or is sharded already, the ranks' partitions or parameters differ, units
            share a parameter, reshard_after_forward is not True, or modules on the meta device cannot be initialised;
            and torch's errors.
        RuntimeError: the model is inside of partnets.subnetwork.

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
    check_outside(model)
    num_partitions(model)  # raises if it has none
    if sharded := [path for path, module in model.named_modules() if isinstance(module, fsdp.FSDPModule)]:
        raise ValueError(
            f"{sharded[0] or 'the model'} is sharded already; call fully_shard once, on the whole model, and pass the"
            " modules to gather at once as units=."
        )
    if options.setdefault("reshard_after_forward", True) is not True:
        raise ValueError(
            f"reshard_after_forward={options['reshard_after_forward']!r} would leave the gathered weights of one"
            " subnetwork for the next; leave it out."
        )
    # torch shards each rank's own copy. Ranks have different parts of parameters with tensor parallelism.
    parameters = {name: parameter for name, parameter in model.named_parameters() if not is_sharded(parameter)}
    vectors = {name: local(buffer) for name, buffer in model.named_buffers() if name.endswith(ROWS)}
    check_agreement(partitions(model) | parameters | vectors)
    mesh = options.get("mesh")
    device = torch.accelerator.current_accelerator() if mesh is None else torch.device(mesh.device_type)
    make = Maker(model, device or torch.device("cpu"), initialise) if initialise else None
    units = _units(model) if units is None else list(units)
    units += [] if model in units or [model] in units else [model]
    gathered, left = _gathered(model, units), _left(model)
    weights = {(one, name) for one in partitioned_modules(model) for name in state_of(one).weights}
    weights = {(one, name) for one, name in weights if not is_sharded(one._parameters[name])}
    for unit, inside in zip(units, gathered, strict=True):
        if make is not None:
            new: list[Tensor] = []
            on_all_ranks(lambda new=new, inside=inside: new.extend(make(inside)))
            check_agreement({f"what initialise gives tensor {i} of a unit": one for i, one in enumerate(new)})
            left = _left(model)  # of which some are new
        fsdp.fully_shard(unit, ignored_params=left, **options)
        owned = [inner for inner in inside if state_of(inner) is not None]
        for module in owned:
            state_of(module).is_gathered = True
        _shard_maps([(one, name) for one in owned for name in state_of(one).weights if (one, name) in weights])
        for module in [unit] if isinstance(unit, nn.Module) else unit:
            module.register_forward_pre_hook(functools.partial(_take_up, owned))
    average = functools.partial(_average, [None] if mesh is None else mesh.get_all_groups())
    for parameter in left:
        parameter.register_post_accumulate_grad_hook(average)
    return model


def _shard_maps(weights: list[tuple[nn.Module, str]]) -> None:
    """Shard the maps and stored defaults of a unit's weights, unless these are cut otherwise than by rows.

    Args:
        weights: modules and names of weights that torch has just sharded.
    """
    shards: dict[Tensor, Tensor] = {}  # tied weights share them
    for module, name in weights:
        parameter = module._parameters[name]
        if all(placement.is_replicate() or placement.is_shard(0) for placement in parameter.placements):
            for key in {name + MAP, name + STORED} & {*module._buffers}:
                buffer = module._buffers[key]
                if buffer not in shards:
                    shards[buffer] = shard(buffer, parameter)
                module._buffers[key] = shards[buffer]


def _gathered(model: nn.Module, units: list[nn.Module | list[nn.Module]]) -> list[list[nn.Module]]:
    """Return the modules that are gathered with each unit.

    Raises:
        ValueError: units share a parameter, of which torch would make two.
    """
    seen: set[nn.Module] = set()
    found, owners, left = [], {}, _left(model)
    for unit in units:
        modules = [unit] if isinstance(unit, nn.Module) else unit
        inside = dict.fromkeys(inner for module in modules for inner in module.modules() if inner not in seen)
        seen.update(inside)
        own = {p for inner in inside for p in inner._parameters.values() if p is not None} - left
        own |= {b for inner in inside for b in inner._buffers.values() if b is not None and b.is_meta}
        for tensor in own:
            if tensor in owners:
                names = {one: name for name, one in (*model.named_parameters(), *model.named_buffers())}
                raise ValueError(
                    f"{names[tensor]} is in two units; pass units= with one, such as a list of modules, that includes"
                    " all modules that share it."
                )
            owners[tensor] = unit
        found.append([*inside])
    return found


def _left(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that are not sharded: ψ and scalars."""
    return {*hyperparameters(model), *(parameter for parameter in model.parameters() if not parameter.dim())}


def _units(model: nn.Module) -> list[nn.Module | list[nn.Module]]:
    """Return the partitioned modules, inner ones first; those that share a parameter as a list, gathered once.

    A MultiheadAttention uses its out_proj without calling it.
    """
    attention = (module for module in model.modules() if isinstance(module, nn.MultiheadAttention))
    used = {inner for module in attention for inner in module.modules() if inner is not module}
    groups: dict[nn.Parameter, list[nn.Module]] = {}
    for module in reversed(partitioned_modules(model)):
        own = list(module.parameters(recurse=False))
        if own and module not in used:
            group = next((groups[parameter] for parameter in own if parameter in groups), [])
            group.append(module)
            groups |= dict.fromkeys(own, group)
    order = {module: i for i, module in enumerate(model.modules())}
    found = {id(group): group for group in groups.values()}.values()
    # After all units that are inside of one of its modules.
    found = sorted(found, key=lambda group: -min(order[module] for module in group))
    return [group if len(group) > 1 else group[0] for group in found]


def _take_up(modules: list[nn.Module], *_) -> None:
    """Let modules compute with the active channels of gathered parameters, and mask the gradients of these.

    Raises:
        RuntimeError: the gradient of another partition's vector has not been reduced yet.
    """
    for module in modules:
        state = state_of(module)
        for name, one in state.exchanged.items():
            gathered = module._parameters[name]
            if gathered.shape != one.parameter.shape:  # narrowed for another module of the unit
                continue
            watch(one, gathered)
            before = state.grad_of.get(name) or state.update
            if gathered.grad is not None and torch.is_grad_enabled() and state.update not in (None, before):
                raise RuntimeError(
                    f"the gradients of partition {before} have not been reduced, and those of {state.update} would be"
                    " added to them; call set_requires_gradient_sync(True) for the last batch of each partition."
                )
            if state.narrow is not None and name in state.narrow.owners and state.active != state.num_partitions:
                module._parameters[name] = state.narrow.take(gathered, name, state.active)


def _average(groups: list[dist.ProcessGroup | None], parameter: nn.Parameter) -> None:
    for group in groups:
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)
