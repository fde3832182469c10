"""Checks that a model is judged by the chunks that it has learned from; it may have seen any example of others."""

from __future__ import annotations

from torch import nn

from partnets.data.chunks import Chunks, check_chunks
from partnets.subnetworks.state import UNKNOWN, PartitionState, num_partitions, partitioned_modules, state_of


def _states(model: nn.Module) -> list[PartitionState]:
    return [state_of(module) for module in partitioned_modules(model)]


def remember_chunks(model: nn.Module, chunks: Chunks) -> None:
    """Store in a model, and in its state_dict, which chunks it learns from; trainers call this.

    Example:
        >>> import partnets, torch
        >>> model = partnets.partition(nn.Linear(4, 2), (0.5, 0.5))
        >>> x = torch.randn(20, 4), torch.randint(2, (20,))
        >>> remember_chunks(model, partnets.chunk(x, (0.5, 0.5)))
        >>> partnets.lml(model, partnets.chunk(x, (0.5, 0.5), seed=1))
        Traceback (most recent call last):
        ValueError: the model has learned from other chunks: ...
    """
    fingerprint = chunks.fingerprint
    for state in _states(model):
        state.learned_from = fingerprint


def has_learned(model: nn.Module) -> bool:
    """Return whether a partition of a model has been trained."""
    return any(state.learned_from is not None for state in _states(model))


def adopt_chunks(model: nn.Module, chunks: Chunks) -> None:
    """Remember the chunks of an evaluation as those that a model has learned from, if its training loop set none."""
    if {state.learned_from for state in _states(model)} - {None} == {UNKNOWN}:
        remember_chunks(model, chunks)


def check_same_chunks(model: nn.Module, chunks: Chunks) -> None:
    """Raise ValueError if a model remembers other chunks than these."""
    remembered = {state.learned_from for state in _states(model)} - {None, UNKNOWN}
    if not all(chunks.is_of(fingerprint) for fingerprint in remembered):
        raise ValueError(
            "the model has learned from other chunks: subnetworks have seen examples of later chunks, and L_ML would"
            " count them as unseen. Call partnets.chunk with the same data, in the same order, and the same proportions"
            " and seed. Pass other_chunks=True if the split is the same and the examples were changed, such as to"
            " another dtype, or if all of them are new to the model."
        )


def check_counts(model: nn.Module, chunks: Chunks) -> None:
    """Raise ValueError unless model and chunks have the same C, and TypeError without chunks."""
    check_chunks(chunks)
    if (count := num_partitions(model)) != len(chunks):
        raise ValueError(
            f"the model has {count} partitions and the data {len(chunks)} chunks; pass the same number of"
            " proportions to partnets.partition and partnets.chunk."
        )
