"""Running statistics of BatchNorm layers: each subnetwork has its own, which may become stale."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from partnets.subnetworks.parameters import partitioned_parameters
from partnets.subnetworks.state import BATCHES, ESTIMATED, ROWS, inside, partitioned_modules, state_of
from partnets.utils.modules import is_sharded, modules_of

# Integer dtypes by their size in bytes.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
UNKNOWN_AT = -1
# sum_of_weights is a checksum of SUM_BITS bits; the bits above are the sum of the parameters' item sizes.
SUM_BITS = 44


def partitioned_norms(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model with running statistics for each subnetwork."""
    return [module for module in partitioned_modules(model) if BATCHES in state_of(module).statistics]


def other_norms(model: nn.Module) -> list[nn.Module]:
    """Return the modules with running statistics that partnets.partition left out.

    They would carry later chunks into earlier subnetworks: train with them in evaluation mode.

    Example:
        >>> import partnets
        >>> model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3), nn.BatchNorm1d(3))
        >>> other_norms(partnets.partition(model, (0.5, 0.5), skip="0")) == [model[0]]
        True
    """
    return other_norms_among(modules_of(model))


def other_norms_among(modules: list[nn.Module]) -> list[nn.Module]:
    """Return other_norms of a list of modules."""
    return [module for module in modules if isinstance(module, _NormBase) and state_of(module) is None]


def following_norms(model: nn.Module) -> list[nn.Module]:
    """Return the modules with running statistics that follow each batch in training mode, even if nothing learns.

    These are the norms that partnets.partition left out, and those in a partnets.Ensemble.
    """
    norms = [module for module in modules_of(model) if isinstance(module, _NormBase)]
    return [norm for norm in norms if (state := state_of(norm)) is None or "running_mean" not in state.statistics]


def batches_of(norm: nn.Module) -> int:
    """Return the number of batches that the statistics of all subnetworks have followed.

    For InstanceNorm, of which torch counts no batches, return a checksum of the running means.
    """
    name, state = "running_mean" if isinstance(norm, _InstanceNorm) else BATCHES, state_of(norm)
    own = norm._buffers[name]
    if own is None or own.is_meta:
        return UNKNOWN_AT
    if state.num_partitions == 1:
        return _sum_of_bits(own)
    rows = norm._buffers[name + ROWS]
    if own.shape != rows.shape[1:]:  # narrow
        return _sum_of_bits(rows)
    return _sum_of_bits(rows) - _sum_of_bits(rows[state.active - 1]) + _sum_of_bits(own)


def is_stale(norm: nn.Module) -> bool:
    """Return whether a partition has learned since the running statistics of a module were estimated or loaded."""
    return state_of(norm).num_partitions > 1 and int(norm._buffers[ESTIMATED][0]) != batches_of(norm)


def hold_statistics(norm: nn.Module, weights: int = 0) -> None:
    """Mark the present running statistics as those of the current weights.

    Args:
        weights: the sum_of_weights of the model; 0 if it is unknown.
    """
    if state_of(norm).num_partitions > 1:
        norm._buffers[ESTIMATED].copy_(torch.tensor([batches_of(norm), weights], device="cpu"))


def stale_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with running statistics older than the weights, by their paths."""
    norms = {path: m for path, m in model.named_modules() if (state := state_of(m)) and BATCHES in state.statistics}
    norms = {path: norm for path, norm in norms.items() if state_of(norm).num_partitions > 1}
    known = {path: int(norm._buffers[ESTIMATED][1]) for path, norm in norms.items()}
    # The stored checksum is that of the whole network; inside a subnetwork it cannot be computed.
    present = sum_of_weights(model) if any(known.values()) and not inside(model) else 0
    return {path: norm for path, norm in norms.items() if is_stale(norm) or _are_others(known[path], present)}


def _are_others(before: int, present: int) -> bool:
    """Return whether two checksums differ although they cover the same parameters in the same dtype."""
    return before != present and before >> SUM_BITS == present >> SUM_BITS != 0


def sum_of_weights(model: nn.Module) -> int:
    """Return a checksum of all partitioned parameters, above 0; or 0 if this rank does not have all of them.

    Example:
        >>> import partnets
        >>> layer = partnets.Linear(2, 2, proportions=(0.5, 0.5))
        >>> before = sum_of_weights(layer)
        >>> _ = nn.init.ones_(layer.weight)
        >>> sum_of_weights(layer) == before
        False
    """
    total, sizes = 1, 0
    for one in partitioned_parameters(model):
        tensor = one.stored.detach()
        if tensor.is_meta or is_lazy(tensor) or is_sharded(tensor):
            return 0
        sizes += tensor.itemsize
        total = (total * 1_000_003 + _sum_of_bits(tensor)) % (1 << SUM_BITS)
    return sizes << SUM_BITS | total


def _sum_of_bits(tensor: torch.Tensor) -> int:
    return int(tensor.reshape(-1).view(WORDS[tensor.itemsize]).sum(dtype=torch.int64))


def outdate_statistics(model: nn.Module) -> None:
    """Mark statistics as stale, because the layers before the norms have changed."""
    for norm in partitioned_norms(model):
        if norm.training and state_of(norm).num_partitions > 1:
            norm._buffers[ESTIMATED].fill_(UNKNOWN_AT)


def warn_of_stale(model: nn.Module) -> None:
    """Warn, at the caller's caller, that running statistics are stale in evaluation mode."""
    if stale := list(stale_norms(model)):
        warnings.warn(
            f"the running statistics of {len(stale)} BatchNorm layers ({stale[0] or 'the model itself'} is the first)"
            " are older than the weights: every step changes several subnetworks, but only the statistics of one. Call"
            " partnets.estimate_statistics(model, chunks) first, as Trainer.fit does at its end.",
            stacklevel=3,
        )
