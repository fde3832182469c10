"""single_chunk and held_out: a dense network and its data, for standard training and validation-set optimisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from partnets.data.chunks import Chunks, chunk
from partnets.data.examples import as_dataset
from partnets.subnetworks.ensemble import Ensemble


def single_chunk(model: nn.Module, data: Dataset[Any] | Sequence[Any], **options: Any) -> tuple[Ensemble, Chunks]:
    """Prepare standard training: one network, one chunk, with fixed hyperparameters.

    Args:
        model: a torch module.
        data: a Dataset of (x, y) or of dicts with labels, or tensors (x, y).
        **options: options of partnets.chunk, such as seed and collate.

    Returns:
        The first arguments of partnets.Trainer: an Ensemble with the model as networks[0], and the chunks.

    Raises:
        TypeError, ValueError: as in partnets.chunk.

    Example:
        >>> import torch, partnets
        >>> model, chunks = single_chunk(nn.Linear(4, 2), (torch.randn(20, 4), torch.randint(2, (20,))))
        >>> history = partnets.Trainer(model, chunks, optimizer=partnets.optim.SGD(model, lr=0.1)).fit(3)
        >>> history.steps["k"]
        [1, 1, 1]
    """
    return Ensemble([model]), chunk(data, (1.0,), **options)


def held_out(
    model: nn.Module,
    data: Dataset[Any] | Sequence[Any],
    *,
    validation: float | Dataset[Any] | Sequence[Any] = 0.1,
    **options: Any,
) -> tuple[Ensemble, Chunks]:
    """Prepare validation-set optimisation: weights learn from D_1, and only ψ from D_2 (Section 5, Table 2).

    This is L_ML with two chunks and all weights in the first partition. Pass Trainer sampling=(1, 0), since the second
    is empty. To finetune afterwards, train `single_chunk(partnets.finalize(model, "finetune"), data)`, with a lower
    learning rate in the paper.

    Args:
        model, data, **options: as in single_chunk.
        validation: the share of the examples in the validation set D_2; or that set itself, in a form like `data`, with
            D_1 then being all of `data`.

    Returns:
        The first arguments of partnets.Trainer.

    Raises:
        TypeError, ValueError: as in partnets.chunk.

    Example:
        >>> import torch, partnets
        >>> from partnets import hyper
        >>> data = torch.randn(20, 4), torch.randint(2, (20,))
        >>> model, chunks = held_out(nn.Sequential(mask := hyper.InputMask(4), nn.Linear(4, 2)), data, validation=0.25)
        >>> history = partnets.Trainer(model, chunks, hyper=mask, sampling=(1, 0)).fit(3)
        >>> chunks.sizes, history.steps["k"], history.steps["hyper_k"]
        ([15, 5], [1, 1, 1], [2, 2, 2])
    """
    if not isinstance(validation, float | int):
        data, sizes = _joined(as_dataset(data), as_dataset(validation))
        indices = range(sizes[0]), range(sizes[0], sum(sizes))
        return Ensemble([model], num_partitions=2), chunk(data, indices=indices, **options)
    return Ensemble([model], num_partitions=2), chunk(data, (1 - validation, validation), **options)


def _joined(first: Dataset, second: Dataset) -> tuple[Dataset, list[int]]:
    """Return two data sets joined, and the number of examples of each."""
    sizes = [len(first), len(second)]
    dtypes = [[one.dtype for one in getattr(data, "tensors", ())] for data in (first, second)]
    if type(first) is type(second) is TensorDataset and dtypes[0] == dtypes[1]:
        # A TensorDataset is indexed without collating.
        return TensorDataset(*map(torch.cat, zip(first.tensors, second.tensors, strict=True))), sizes
    return ConcatDataset([first, second]), sizes
