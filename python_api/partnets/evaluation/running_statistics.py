"""BatchNorm's running statistics, estimated again for each subnetwork from the chunks that it has learned from."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from partnets.data.batch import Forward, call
from partnets.data.chunks import Chunks
from partnets.data.fetching import batches, check_options
from partnets.evaluation.same_chunks import check_counts, check_same_chunks
from partnets.subnetworks.context import subnetwork
from partnets.subnetworks.state import ESTIMATED, ROWS, state_of
from partnets.subnetworks.statistics import hold_statistics, is_stale, stale_norms, sum_of_weights
from partnets.utils import random_state
from partnets.utils.checks import check_at_least
from partnets.utils.modules import device_of, evaluating, is_frozen, to_device

# With more examples, L_ML changes by less than with other draws of an augmentation.
EXAMPLES = 2048


def estimate_statistics(
    model: nn.Module,
    chunks: Chunks,
    *,
    batch_size: int = 256,
    examples: int = EXAMPLES,
    other_chunks: bool = False,
    forward: Forward = call,
    **loading: Any,
) -> None:
    """Estimate each subnetwork's running statistics of BatchNorm and InstanceNorm layers with the current weights.

    A step of w_k changes subnetworks k..C, but updates only k's running statistics. So they are estimated before
    a model is evaluated or deployed: for subnetwork k from examples of D_1:k, which it may see, as the average over
    batches of mean and variance, with all other layers in evaluation mode. Norms that have not learned since their last
    estimate or since partitioning keep their statistics, such as frozen ones and those in evaluation mode in a model in
    training mode, and all of them in a second call.
    Trainer, lml and loss_matrix call this function; in a custom loop, call it before partnets.merge.

    Args:
        model: a model with partitioned layers; its running statistics are changed in place.
        chunks: the chunks that it learns from.
        batch_size: number of examples per batch; similar to that of training, as the statistics are of batches.
        examples: maximum number of examples of D_1:k, drawn at random, the same in each call.
        other_chunks, forward, **loading: as in partnets.lml.

    Raises:
        ValueError: a number is below 1, or the model has learned from other chunks; and as in partnets.lml.

    Example:
        >>> import partnets
        >>> from partnets.subnetworks.statistics import is_stale
        >>> model = partnets.partition(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), (0.8, 0.2))
        >>> chunks = partnets.chunk((torch.randn(60, 4), torch.randint(2, (60,))), (0.8, 0.2))
        >>> with partnets.subnetwork(model, 1, 1):
        ...     _ = model(torch.randn(16, 4))
        >>> is_stale(model[1])
        True
        >>> partnets.estimate_statistics(model, chunks)
        >>> is_stale(model[1])
        False
    """
    check_counts(model, chunks)
    check_at_least(1, batch_size=batch_size, examples=examples)
    if not other_chunks:
        check_same_chunks(model, chunks)
    loading = check_options(loading, "estimate_statistics")
    stale = []
    for norm in stale_norms(model).values():
        if (model.training or is_frozen(norm)) and not (norm.training or is_stale(norm)):
            hold_statistics(norm, sum_of_weights(model))  # the weights were trained with these statistics
        else:
            stale.append(norm)
    if not stale:
        return
    before = [(norm, norm.training, norm.momentum) for norm in stale]
    statistics = _copied(stale)
    device = device_of(model)
    try:
        with random_state.preserved(device), torch.no_grad(), evaluating(model):
            random_state.seed_all(0)
            for norm in stale:
                norm.training = True
            for k in range(1, len(chunks) + 1):
                with subnetwork(model, active=k, update=k):
                    for norm in stale:
                        norm.num_batches_tracked.zero_()
                    for n, batch in enumerate(_batches(chunks, k, batch_size, examples, loading), 1):
                        for norm in stale:
                            norm.momentum = 1 / n  # the unweighted mean over all batches
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
def fresh_statistics(model: nn.Module, chunks: Chunks, **options: Any) -> Iterator[None]:
    """Use the running statistics of estimate_statistics inside this context, and restore them afterwards."""
    before = _copied(stale_norms(model).values())
    try:
        estimate_statistics(model, chunks, **options)
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)


def _copied(norms: Collection[nn.Module]) -> list[tuple[Tensor, Tensor]]:
    """Return the running statistics of all subnetworks, with copies of them."""
    names = ((norm, name + end) for norm in norms for name in state_of(norm).statistics for end in ("", ROWS))
    buffers = [getattr(norm, name) for norm, name in names] + [norm.get_buffer(ESTIMATED) for norm in norms]
    return [(buffer, buffer.clone()) for buffer in buffers]


def _batches(chunks: Chunks, k: int, batch_size: int, examples: int, loading: Mapping[str, Any]) -> Iterator:
    """Yield batches of D_1:k, all of one size, because a smaller one would have the same weight."""
    drawn = chunks.order[: sum(chunks.sizes[:k])]
    generator = torch.Generator().manual_seed(0)  # shuffles examples, as a custom split may be sorted
    if len(drawn) <= examples:
        drawn = drawn[torch.randperm(len(drawn), generator=generator, device="cpu")]
    else:
        drawn = drawn[torch.randint(len(drawn), (examples,), generator=generator, device="cpu")]
    size = min(batch_size, len(drawn))
    drawn = drawn[: len(drawn) // size * size]
    with closing(batches(chunks.dataset, size, drawn, chunks.collate, loading)) as parts:
        yield from parts
