"""Metrics of a model, or of each of its subnetworks, on given examples: accuracy, mean loss, and the loss matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from partnets.data.batch import OWN_RULE, Forward, call
from partnets.data.chunks import Chunks
from partnets.data.examples import Collate, as_dataset, refuse_separate
from partnets.data.fetching import batches, check_options
from partnets.evaluation.running_statistics import fresh_statistics
from partnets.evaluation.same_chunks import adopt_chunks
from partnets.subnetworks.context import subnetwork
from partnets.subnetworks.state import num_partitions
from partnets.subnetworks.statistics import warn_of_stale
from partnets.utils.losses import Loss, check_mean, check_no_sum, no_classes, plain, scores, summed
from partnets.utils.modules import device_of, evaluating, to_device

# The result of a metric.
Value = TypeVar("Value")
# The largest uint8, which marks unlabelled pixels in images of labels.
UNLABELLED = 255


def mean_loss(
    model: nn.Module,
    data: Dataset[Any] | Sequence[Any],
    loss: Loss = F.cross_entropy,
    *,
    batch_size: int = 256,
    collate: Collate = default_collate,
    forward: Forward = call,
    **loading: Any,
) -> float:
    """Compute the mean of a loss over examples, or over all targets that count, in evaluation mode without gradients.

    Args:
        model: any module; of a partitioned one, the active subnetwork.
        data: a Dataset of pairs (x, y) or of dicts with labels, or tensors (x, y); batches are moved to the model's
            device.
        loss: loss(output, y), the mean of a batch as torch's criteria return it, or the losses themselves. If y has a
            class for each token or pixel, a batch's mean is weighted by its number of classes that are not -100,
            otherwise by its number of examples. Losses with a dimension, as with reduction="none", have equal weights.
        batch_size: number of examples per batch.
        collate: makes a batch of a list of examples, as in partnets.chunk.
        forward: forward(model, batch), which returns output and y; see partnets.data.batch.call for the default.
        **loading: num_workers, pin_memory and other options of a DataLoader.

    Raises:
        ValueError: there is no example, or none that counts; or the loss is a sum over the batch.
        TypeError: data or an option has another type.

    Example:
        >>> mean_loss(nn.Flatten(), (torch.zeros(3, 2), torch.tensor([0, 1, 1])))  # log 2
        0.6931...
    """
    how = {"batch_size": batch_size, "collate": collate, "forward": forward}
    found, count = total_loss(model, data, loss, loading=check_options(loading, "mean_loss"), **how)
    return found / count


def total_loss(
    model: nn.Module,
    data: Dataset[Any] | Sequence[Any],
    loss: Loss,
    *,
    batch_size: int,
    collate: Collate,
    forward: Forward,
    loading: Mapping[str, Any],
) -> tuple[float, int]:
    """Return the sum and the number of losses over which mean_loss averages; same arguments."""
    if isinstance(loss, Tensor):
        refuse_separate("mean_loss(model, (x, y), loss)", (loss,))
    dataset = as_dataset(data)
    left = len(dataset)
    if not left:
        raise ValueError("the data have no example; pass at least one.")
    check_mean(loss)
    warn_of_stale(model)
    device = device_of(model)
    found, count = 0.0, 0
    fetched = closing(batches(dataset, batch_size, collate=collate, loading=loading))
    with torch.no_grad(), evaluating(model), fetched as parts:
        for batch in parts:
            examples = min(batch_size, left)
            left -= examples
            output, y = forward(model, to_device(batch, device))
            value, counted = summed(loss, output, y, examples)
            if not count:
                check_no_sum(loss, output, y, value / max(counted, 1))
            found, count = found + value.item(), count + counted
    if not count:
        raise ValueError(f"no target of these {len(dataset)} examples counts; pass labelled ones.")
    return found, count


def accuracy(
    model: nn.Module,
    data: Dataset[Any] | Sequence[Any],
    *separate: Any,
    batch_size: int = 256,
    collate: Collate = default_collate,
    forward: Forward = call,
    ignore_index: int | None = None,
    **loading: Any,
) -> float:
    """Compute the share of labels with the largest logit; other arguments as in mean_loss.

    Logits are [batch, classes, ...] and labels [batch, ...], as in torch's cross_entropy. The result is NaN if a logit
    of a counted label is NaN.

    Args:
        ignore_index: the label to ignore; by default all negative ones, and 255 if it is not a class.

    Raises:
        ValueError: another label is not a class of the logits, or the logits have another shape.

    Example:
        >>> accuracy(nn.Flatten(), (torch.eye(4), torch.tensor([0, 1, 2, 0])))
        0.75
    """
    refuse_separate("accuracy(model, (x, y))", separate)

    def right(output: Any, y: Tensor) -> Tensor:
        logits = scores(output)
        if not isinstance(logits, Tensor):
            raise ValueError(f"the output is a {type(output).__name__} without logits; return a tensor, {OWN_RULE}.")
        if logits.shape[1:2] == (1,):
            raise ValueError(
                f"the output is {list(logits.shape)}, of one class; accuracy takes a logit for each class. For a single"
                " logit, pass mean_loss a loss that counts correct predictions."
            )
        found = logits.argmax(1)
        if found.shape != y.shape:
            raise ValueError(
                f"the logits are {list(logits.shape)} and the labels {list(y.shape)}; they must be [batch, classes,"
                f" ...] and [batch, ...]: transpose them, {OWN_RULE}."
            )
        unknown, strange = logits.isnan().any(1), no_classes(logits, y)
        unlabelled = strange & ((y < 0) | (y == UNLABELLED)) if ignore_index is None else y == ignore_index
        if (wrong := y[strange & ~unlabelled]).numel():
            raise ValueError(
                f"a label is {int(wrong[0])}, and the network has {logits.shape[1]} classes; pass labels from 0, or"
                f" ignore_index={int(wrong[0])} if it does not count."
            )
        return (found == y).float().masked_fill(unknown, math.nan)[~unlabelled]

    return mean_loss(model, data, right, batch_size=batch_size, collate=collate, forward=forward, **loading)


def per_subnetwork(model: nn.Module, metric: Callable[[nn.Module], Value]) -> list[Value]:
    """Return metric(model) for each of the subnetworks 1..C.

    Example:
        >>> import partnets
        >>> model = partnets.Linear(2, 2, proportions=(0.5, 0.5), defaults="zero", seed=0)
        >>> test = torch.randn(8, 2), torch.randint(2, (8,))
        >>> len(per_subnetwork(model, lambda model: accuracy(model, test)))
        2
    """
    values = []
    for k in range(1, num_partitions(model) + 1):
        with subnetwork(model, active=k):
            values.append(metric(model))
    return values


def loss_matrix(
    model: nn.Module,
    chunks: Chunks,
    loss: Loss = F.cross_entropy,
    *,
    batch_size: int = 256,
    other_chunks: bool = False,
    forward: Forward = call,
    **loading: Any,
) -> Tensor:
    """Compute the mean loss of each subnetwork on each chunk, in nats per example, or per token as in mean_loss.

    Subnetwork k has learned from chunks 1..k, so entries right of the diagonal are losses on unseen data. The entries
    (k - 1, k), multiplied by the chunks' sizes (in tokens, if losses are per token), sum to -L_ML (Eq. 2).

    Args:
        model, chunks, loss, batch_size, other_chunks, forward, **loading: as in partnets.lml.

    Returns:
        [C, C] float64, row k - 1 for subnetwork k, column j - 1 for chunk j.

    Raises:
        ValueError: the model and the chunks differ in C, or it has learned from other chunks.

    Example:
        >>> import partnets
        >>> model = partnets.Linear(2, 2, proportions=(0.5, 0.5), defaults="zero", seed=0)
        >>> chunks = partnets.chunk((torch.randn(8, 2), torch.randint(2, (8,))), (0.5, 0.5))
        >>> loss_matrix(model, chunks).shape
        torch.Size([2, 2])
    """
    loss = plain(loss)
    how = {"batch_size": batch_size, "forward": forward, **loading}
    with fresh_statistics(model, chunks, other_chunks=other_chunks, **how):
        how["collate"] = chunks.collate
        rows = per_subnetwork(model, lambda model: [mean_loss(model, chunk, loss, **how) for chunk in chunks])
    if not other_chunks:
        adopt_chunks(model, chunks)
    return torch.tensor(rows, dtype=torch.float64, device="cpu")
