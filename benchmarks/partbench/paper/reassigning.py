"""reassign: partitions that move during training (Appendix C's future work)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partkernels import Partition, Stored
from partkernels.arguments import check_seed, sizes
from partnets.evaluation.same_chunks import has_learned
from partnets.optim import PartitionedOptimizer
from partnets.optim.base import check_partitioned
from partnets.subnetworks.assignment import set_partition
from partnets.subnetworks.parameters import PartitionedParameter, partitioned_parameters
from partnets.subnetworks.partitioning import share
from partnets.subnetworks.rules import rule_of
from partnets.subnetworks.state import inside, partition_of, partitioned_modules, state_of
from partnets.subnetworks.state import num_partitions as count
from partnets.subnetworks.statistics import outdate_statistics
from partnets.utils.modules import is_sharded
from partnets.utils.seeds import derived

ORDERS = ("random", "magnitude")


@torch.no_grad()
def reassign(
    model: nn.Module,
    proportions: Sequence[float],
    optimizer: PartitionedOptimizer | None = None,
    *,
    by: str = "random",
    seed: int = 0,
) -> dict[str, int]:
    """Give partitions other shares of the weights, in place, with as few moves as possible.

    An entry that moves to a later partition keeps its value, because the later partition may know all chunks that the
    entry has seen. An entry that moves to an earlier partition has seen chunks that this partition must not know. It is
    reset to its default, and its moments to the mean moments of the partition. So the invariant holds whenever
    partitions move. With the scheme 'node', all weights of an output move together. Biases and scales do not move.
    Copies of the model keep their partitions: make them again.

    Args:
        model: partitioned by the scheme 'weight' or 'node'.
        proportions: C numbers that sum to 1: the shares of each weight after this.
        optimizer: the model's optimiser of partnets.optim; the moments of moved entries are adapted. Required after the
            first step, because moments contain information about chunks.
        by: which entries move to a later partition: 'random', or 'magnitude', those that differ least from their
            defaults. Entries that move to an earlier partition are always random, because their values contain
            information about later chunks.
        seed: an int in [0, 2**63) for random choices, combined with each weight's path.

    Returns:
        The numbers of moved entries: {'later': n, 'earlier': n}.

    Raises:
        ValueError: the proportions are not C numbers that sum to 1, by or seed is invalid, partitions are nested,
            weights are sharded, or the optimiser is missing; nothing has changed then.
        RuntimeError: the model is inside of partnets.subnetwork.

    Example:
        >>> import partnets
        >>> model = partnets.partition(nn.Linear(10, 10), (0.8, 0.1, 0.1))
        >>> reassign(model, (0.2, 0.2, 0.6))
        {'later': 60, 'earlier': 0}
        >>> partnets.partitions(model)["weight"].sizes()
        [20, 20, 60]
    """
    if by not in ORDERS:
        raise ValueError(f"by={by!r}; pass one of {', '.join(map(repr, ORDERS))}.")
    check_seed("seed", seed)
    if optimizer is not None:
        check_partitioned(optimizer)
    weights = [
        one for one in partitioned_parameters(model) if one.partition is not None and one.parameter.requires_grad
    ]
    paths = {module: path for path, module in model.named_modules()}
    _check(model, weights, proportions, paths)
    if optimizer is None and has_learned(model):
        raise ValueError(
            "the model has learned, and moments of its entries may tell earlier partitions of chunks that they must not"
            " know; pass optimizer, that which has stepped it."
        )
    aliases = defaultdict(list)
    for module in partitioned_modules(model):
        for name in state_of(module).weights:
            aliases[id(module._parameters[name])].append((module, name))
    moved = {"later": 0, "earlier": 0}
    for one in weights:
        parameter, partition, old = one.parameter, partition_of(one.module, one.name), one.partition.ids()
        defaults = partition.defaults
        values = defaults.values(parameter.shape, parameter.dtype, parameter.device)
        if isinstance(defaults, Stored):  # partition 1 has no defaults: they become its current values
            values = torch.where(old == 1, parameter, values)
            defaults = Stored(values)
        distance = (parameter - values).abs() if by == "magnitude" else None
        generator = torch.Generator().manual_seed(derived(derived(seed, paths[one.module]), one.name))
        outputs, of_outputs = _outputs(one, old)
        if outputs is None:
            new = _moved(old, proportions, distance, generator)
        else:
            if distance is not None:
                sums = distance.new_zeros(len(of_outputs))
                distance = sums.index_add_(0, outputs.reshape(-1), distance.reshape(-1))
            new = _moved(of_outputs, proportions, distance, generator)[outputs]
        earlier = new < old
        moved["later"] += int((new > old).sum())
        moved["earlier"] += int(earlier.sum())
        parameter.copy_(torch.where(earlier, values, parameter))
        set_partition(
            one.module, one.name, Partition.from_ids(new, num_partitions=partition.num_partitions, defaults=defaults)
        )
        for module, name in aliases[id(parameter)]:
            if (module, name) != (one.module, one.name):
                share(one.module, one.name, module, name)
        for name, like in optimizer.state[parameter].items() if optimizer else ():
            if name != "step":
                _start_anew(like, old, new)
    outdate_statistics(model)
    return moved


def _start_anew(moment: Tensor, old: Tensor, new: Tensor) -> None:
    """Set the moments of entries that moved to an earlier partition to the mean of its moments.

    With moments of 0, an optimiser that divides by their root would take large steps: its bias correction counts the
    steps of the partition, not of the entry.
    """
    for k in new[new < old].unique().tolist():
        own = moment[old == k]
        moment[(new == k) & (old > k)] = own.mean() if own.numel() else 0


def _check(
    model: nn.Module, weights: list[PartitionedParameter], proportions: Sequence[float], paths: dict[nn.Module, str]
) -> None:
    sizes(0, proportions)
    if inside(model):
        raise RuntimeError("the model is one of its subnetworks now; call reassign outside of partnets.subnetwork.")
    if nested := [paths[one.module] for one in weights if one.state.narrow is not None]:
        raise ValueError(f"{nested[0]} is nested, with its channels in order; use schemes 'weight' and 'node'.")
    if len(proportions) != count(model):
        raise ValueError(f"there are {len(proportions)} proportions and {count(model)} partitions; pass one for each.")
    if sharded := [paths[one.module] for one in weights if is_sharded(one.parameter)]:
        raise ValueError(f"{sharded[0]} is sharded; reassign before fully_shard, on each rank alike.")


def _outputs(one: PartitionedParameter, ids: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return each entry's output, or None if the entries of an output have several owners; and the outputs' owners."""
    outputs = rule_of(type(one.module)).outputs(one.module, one.name, one.parameter).expand(ids.shape).to(ids.device)
    first = ids.new_zeros(int(outputs.max()) + 1 if outputs.numel() else 0)
    first[outputs.reshape(-1)] = ids.reshape(-1)
    is_alike = bool((first[outputs] == ids).all()) and first.numel() < ids.numel()
    return outputs if is_alike and int(ids.max()) > int(ids.min()) else None, first


def _moved(ids: Tensor, proportions: Sequence[float], distance: Tensor | None, generator: torch.Generator) -> Tensor:
    """Return the owners after the fewest moves that give partitions these shares."""
    owners = ids.reshape(-1).cpu().long()
    wanted = torch.tensor(sizes(ids.numel(), proportions), device="cpu")
    surplus = torch.bincount(owners, minlength=len(wanted) + 1)[1:] - wanted
    # The destinations of surplus entries, in order, so that moves do not cross.
    places = torch.repeat_interleave(torch.arange(1, len(wanted) + 1, device="cpu"), (-surplus).clamp(min=0))
    new = owners.clone()
    for k, mine in enumerate(places.split(surplus.clamp(min=0).tolist()), 1):
        given = (owners == k).nonzero()[:, 0]
        given = given[torch.randperm(len(given), generator=generator, device="cpu")]
        earlier = int((mine < k).sum())
        if distance is not None:
            far = distance.reshape(-1)[given.to(distance.device)].cpu()
            far[:earlier] = -1  # these were chosen at random
            given = given[far.argsort(stable=True)]
        new[given[: len(mine)]] = mine
    return new.view(ids.shape).to(ids)
