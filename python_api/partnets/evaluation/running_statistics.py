"""BatchNorm's running statistics, estimated anew for each subnetwork from what it has learned from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import nn

from partnets.data.batch import Forward, call
from partnets.data.chunks import Chunks, check_chunks
from partnets.data.fetching import batches, check_options
from partnets.evaluation.same_chunks import check_same_chunks
from partnets.subnetworks.statistics import hold_statistics, stale_norms, sum_of_weights
from partnets.subnetworks.context import subnetwork
from partnets.utils.checks import check_at_least
from partnets.utils.modules import device_of, evaluating, to_device
from partnets.utils.random_state import preserved

# More change L_ML by less than the draws of an augmentation do.
EXAMPLES = 2048


def estimate_statistics(
    model: nn.Module,
    chunks: Chunks,
    *,
    batch_size: int = 256,
    examples: int = EXAMPLES,
    other_chunks: bool = False,
    forward: Forward = call,
    **loading,
) -> None:
    """Gives each subnetwork the running statistics that its BatchNorm layers have with the present weights.

    A step of w_k changes subnetworks k..C, and only k's running statistics follow. So they are estimated before
    anything is judged or deployed: those of subnetwork k from examples of D_1:k, which it may see, as the mean over
    batches of their mean and variance, with everything else in evaluation mode. Norms that have not learned since they
    were estimated, or divided, keep theirs: frozen ones, and all of them in a second call. Trainer, lml and loss_matrix
    do this by themselves; call it before partnets.merge in a loop of your own.

    Args:
        model: with partitioned layers; its running statistics change, in place.
        chunks: what it learns from.
        batch_size: the examples at once; about that of training, for statistics are of batches.
        examples: at most so many of D_1:k, drawn at random, the same each time.
        other_chunks, forward, **loading: as of partnets.lml.

    Raises:
        ValueError: a number is below 1, or the model has learned from other chunks; and as partnets.lml.

    Example:
        >>> import partnets
        >>> model = partnets.partition(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), (0.8, 0.2))
        >>> chunks = partnets.chunk((torch.randn(60, 4), torch.randint(2, (60,))), (0.8, 0.2))
        >>> with partnets.subnetwork(model, 1, 1):
        ...     _ = model(torch.randn(16, 4))
        >>> model[1].is_stale
        True
        >>> partnets.estimate_statistics(model, chunks)
        >>> model[1].is_stale
        False
    """
    check_chunks(chunks)
    check_at_least(1, batch_size=batch_size, examples=examples)
    if not other_chunks:
        check_same_chunks(model, chunks)
    loading = check_options(loading, "estimate_statistics")
    stale = list(stale_norms(model).values())
    if not stale:
        return
    before = [(norm, norm.training, norm.momentum) for norm in stale]
    statistics = [(buffer, buffer.clone()) for norm in stale for buffer in norm.buffers()]
    device = device_of(model)
    try:
        with preserved(device), torch.no_grad(), evaluating(model):
            torch.manual_seed(0)
            for norm in stale:
                norm.training, norm.momentum = True, None  # None: the mean over all batches, each alike
            for k in range(1, chunks.count + 1):
                with subnetwork(model, active=k, update=k):
                    for norm in stale:
                        norm.num_batches_tracked.zero_()
                    for batch in _batches(chunks, k, batch_size, examples, loading):
                        forward(model, to_device(batch, device))
    except BaseException:
        for buffer, value in statistics:
            buffer.copy_(value)
        raise
    finally:
        for norm, training, momentum in before:
            norm.training, norm.momentum = training, momentum
    weights = sum_of_weights(model)
    for norm in stale:
        hold_statistics(norm, weights)


@contextmanager
def fresh_statistics(model: nn.Module, chunks: Chunks, **options) -> Iterator[None]:
    """Inside, running statistics are those that estimate_statistics finds; afterwards they are as before."""
    before = [
        (norm, [b.clone() for b in norm.buffers()])
        for norm in stale_norms(model).values()
    ]
    try:
        estimate_statistics(model, chunks, **options)
        yield
    finally:
        for norm, values in before:
            for buffer, value in zip(norm.buffers(), values, strict=True):
                buffer.copy_(value)


def _batches(chunks: Chunks, k: int, batch_size: int, examples: int, loading: Mapping[str, Any]) -> Iterator:
    """Batches of D_1:k, all of one size: a smaller one would count as much."""
    drawn = chunks.order[: sum(chunks.sizes[:k])]
    generator = torch.Generator().manual_seed(0)  # a split of one's own may be sorted, and batches should not be
    if len(drawn) <= examples:
        drawn = drawn[torch.randperm(len(drawn), generator=generator, device="cpu")]
    else:
        drawn = drawn[torch.randint(len(drawn), (examples,), generator=generator, device="cpu")]
    size = min(batch_size, len(drawn))
    drawn = drawn[: len(drawn) // size * size]
    with closing(batches(chunks.dataset, size, drawn, chunks.collate, loading)) as parts:
        yield from parts
