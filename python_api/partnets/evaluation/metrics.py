"""What a model, or each of its subnetworks, makes of given examples: accuracy, mean loss, and the loss matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from partnets.data.chunks import Chunks, as_dataset, batches
from partnets.nn.live import subnetwork
from partnets.nn.partitioned import count
from partnets.utils.modules import device_of, evaluating, to_device


def mean_loss(
    model: nn.Module,
    data: Dataset | Sequence[Tensor],
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    *,
    batch_size: int = 256,
    collate: Callable[[list], Any] = default_collate,
) -> float:
    """The mean of loss(model(x), y) over examples, in evaluation mode and without gradients.

    Args:
        model: any; the live subnetwork of a partitioned one.
        data: a Dataset of (x, y), or tensors (x, y); batches go to the model's device.
        loss: loss(output, y), a mean over the examples of a batch, as torch's criteria return it.
        batch_size: the examples at once.
        collate: makes a batch of a list of examples, as for partnets.chunk.

    Raises:
        ValueError: there is no example.

    Example:
        >>> mean_loss(nn.Flatten(), (torch.zeros(3, 2), torch.tensor([0, 1, 1])))  # log 2
        0.6931...
    """
    dataset = as_dataset(data)
    if not len(dataset):
        raise ValueError("the data have no example; pass at least one.")
    device = device_of(model)
    total = 0.0
    with torch.no_grad(), evaluating(model):
        for x, y in batches(dataset, batch_size, collate=collate):
            total += len(y) * loss(model(to_device(x, device)), to_device(y, device)).item()
    return total / len(dataset)


def accuracy(
    model: nn.Module,
    data: Dataset | Sequence[Tensor],
    *,
    batch_size: int = 256,
    collate: Callable[[list], Any] = default_collate,
) -> float:
    """The share of examples whose greatest logit is the label's; arguments and errors as of mean_loss.

    Example:
        >>> accuracy(nn.Flatten(), (torch.eye(4), torch.tensor([0, 1, 2, 0])))
        0.75
    """

    def share(logits: Tensor, y: Tensor) -> Tensor:
        return (logits.argmax(1) == y).float().mean()

    return mean_loss(model, data, share, batch_size=batch_size, collate=collate)


def per_subnetwork(model: nn.Module, metric: Callable[[nn.Module], float]) -> list[float]:
    """metric(model) for the subnetworks 1..C in turn.

    Example:
        >>> import partnets
        >>> model = partnets.Linear(2, 2, proportions=(0.5, 0.5), defaults="zero", seed=0)
        >>> test = torch.randn(8, 2), torch.randint(2, (8,))
        >>> len(per_subnetwork(model, lambda model: accuracy(model, test)))
        2
    """
    values = []
    for k in range(1, count(model) + 1):
        with subnetwork(model, active=k):
            values.append(metric(model))
    return values


def loss_matrix(
    model: nn.Module,
    chunks: Chunks,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    *,
    batch_size: int = 256,
) -> Tensor:
    """The mean loss of each subnetwork on each chunk, in nats per example.

    Subnetwork k has learned from chunks 1..k: what stands to the right of the diagonal is loss on data that it has not
    seen. The entries (k - 1, k), times the chunks' sizes, add up to -L_ML (Eq. 2).

    Args:
        model, chunks, loss, batch_size: as in partnets.lml.

    Returns:
        [C, C] float64, row k - 1 for subnetwork k, column j - 1 for chunk j.

    Raises:
        ValueError: the model and the chunks differ in C.

    Example:
        >>> import partnets
        >>> model = partnets.Linear(2, 2, proportions=(0.5, 0.5), defaults="zero", seed=0)
        >>> chunks = partnets.chunk((torch.randn(8, 2), torch.randint(2, (8,))), (0.5, 0.5))
        >>> loss_matrix(model, chunks).shape
        torch.Size([2, 2])
    """
    check_counts(model, chunks)
    how = {"batch_size": batch_size, "collate": chunks.collate}
    rows = per_subnetwork(model, lambda model: [mean_loss(model, chunk, loss, **how) for chunk in chunks])
    return torch.tensor(rows, dtype=torch.float64)


def check_counts(model: nn.Module, chunks: Chunks) -> None:
    """Raises ValueError unless the model has as many partitions as there are chunks."""
    if count(model) != chunks.count:
        raise ValueError(
            f"the model has {count(model)} partitions and the data {chunks.count} chunks; pass the same number of"
            " proportions to partnets.partition and partnets.chunk."
        )
