"""state_dicts of partitioned modules: hooks that check loaded entries, and refuse state_dicts inside a subnetwork."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partkernels import Partition, Zeros
from partnets.subnetworks.exchanged import version_of
from partnets.subnetworks.parameters import PartitionedParameter
from partnets.subnetworks.state import (
    DEFAULTS,
    ESTIMATED,
    LEARNED,
    MAP,
    ROWS,
    STORED,
    PartitionState,
    bytes_of,
    check_map,
    defaults_of,
    holder_of,
    parameter_of,
    read_defaults,
    state_of,
    text_of,
)
from partnets.subnetworks.statistics import UNKNOWN_AT
from partnets.subnetworks.switch import noted
from partnets.utils.modules import is_sharded
from partnets.utils.shards import local, version


def add_hooks(module: nn.Module) -> None:
    """Register the hooks of a partitioned module, which its copies keep."""
    module.register_load_state_dict_pre_hook(_before_loading)
    module.register_load_state_dict_post_hook(_after_loading)
    module.register_state_dict_pre_hook(_before_saving)


def remove_hooks(module: nn.Module) -> None:
    """Undo add_hooks."""
    ours = _before_loading, _after_loading, _before_saving
    for hooks in (
        module._load_state_dict_pre_hooks,
        module._load_state_dict_post_hooks,
        module._state_dict_pre_hooks,
    ):
        # torch wraps hooks that it calls before it loads.
        for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) in ours]:
            del hooks[key]


def _before_loading(module: nn.Module, state_dict: dict, prefix: str, *rest) -> None:
    """Add faults of partitions to the errors of load_state_dict; record the missing entries."""
    *_, errors = rest
    state = _whole_state(module)
    for known in state.sums_of_maps.values():
        known.clear()
    for name in state.weights:
        saved = {end: state_dict.get(prefix + name + end) for end in ("", MAP, DEFAULTS, STORED)}
        if fault := _fault(module, name, saved, prefix):
            errors.append(f"{prefix}{name}{fault}")
    names = [prefix + name + end for name in state.statistics for end in ("", ROWS)]
    if prefix + ESTIMATED in state_dict and any(name not in state_dict for name in names):
        del state_dict[prefix + ESTIMATED]  # the statistics that stay are of other weights
        module._buffers[ESTIMATED].fill_(UNKNOWN_AT)
    if prefix + LEARNED not in state_dict:
        local(module._buffers[LEARNED]).copy_(bytes_of(state.learned_from))


def _whole_state(module: nn.Module) -> PartitionState:
    """Return a module's state; raise RuntimeError while a subnetwork is active."""
    state = state_of(module)
    if state.entry.thread is not None or state.active != state.num_partitions:
        raise RuntimeError(
            f"the model is subnetwork {state.active} now, whose state_dict lacks the entries of other partitions; take"
            " or load it outside of partnets.subnetwork."
        )
    return state


def _fault(module: nn.Module, name: str, saved: dict[str, Tensor | None], prefix: str) -> str | None:
    """Return the fault of the saved partitions of a weight, as a predicate that follows its name, or None."""
    state, weight, own = state_of(module), parameter_of(module, name), module._buffers[name + MAP]
    map, numbers = saved[MAP], saved[DEFAULTS]
    if saved[""] is not None and (map is None or numbers is None):
        return (
            f" comes without {name}{MAP} or {name}{DEFAULTS}, so its entries would belong to other partitions than they"
            " learned in; load weights of a dense model before partnets.partition."
        )
    if map is not None and not is_sharded(map) and not is_sharded(own) and map.shape == own.shape:
        try:
            Partition(tuple(weight.shape), state.num_partitions, map.contiguous(), Zeros())
        except ValueError as error:
            return f"{MAP}: {error}"
        if state.narrow is not None and name in state.narrow.owners:
            ids = state.narrow.partition(name, weight.shape)
            if not torch.equal(map.cpu(), Partition.from_ids(ids, num_partitions=state.num_partitions).map):
                raise RuntimeError(
                    f"{prefix}{name}{MAP} has other partitions than those of this model's nested channels; partition"
                    " the model as the saved one was."
                )
    if numbers is None or is_sharded(numbers) or numbers.shape != (6,) or numbers.is_meta:
        return None
    if (count := int(numbers[4])) != state.num_partitions:
        return f"{MAP} has {count} partitions; this model has {state.num_partitions}."
    is_stored = defaults_of(numbers) is None
    if is_stored != (name + STORED in module._buffers):
        kinds = ("stored defaults", "other ones") if is_stored else ("no stored defaults", "some")
        return f" has {kinds[0]}, and this model has {kinds[1]}; pass the same defaults= to partnets.partition."
    return f"{STORED} is missing, the stored defaults of {name}." if is_stored and saved[STORED] is None else None


def _after_loading(module: nn.Module, incompatible_keys) -> None:
    """Take the defaults and the fingerprint of chunks that a state_dict had."""
    state = state_of(module)
    for name in state.weights:
        read_defaults(module, name)
        check_map(module, name)
    if not module._buffers[LEARNED].is_meta:
        state.learned_from = text_of(local(module._buffers[LEARNED]))


@torch.no_grad()
def _before_saving(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Write the fingerprint of chunks into its buffer; raise RuntimeError while a subnetwork is active."""
    state = _whole_state(module)
    local(module._buffers[LEARNED]).copy_(bytes_of(state.learned_from))
    for name in state.weights:
        check_map(module, name)
    for name in state.vectors:  # their rows may have been written into
        one, before = PartitionedParameter(module, name), state.versions.get(name)
        if before is not None and before[0] == version(one.parameter) and before != version_of(one):
            one.combine()
            noted([one])
    for name in state.statistics:
        module._buffers[name + ROWS][-1].copy_(holder_of(module, name)[name])
