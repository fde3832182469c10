"""Examples: conversion of data to datasets, and of their examples to batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, SupportsIndex, overload

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

Collate = Callable[[list[Any]], Any]


class Indices(Sequence[int]):
    """A sequence of ints stored in an int64 tensor, for a Subset: 8 bytes each instead of 36 in a list."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return len(self.tensor)

    @overload
    def __getitem__(self, i: SupportsIndex) -> int: ...

    @overload
    def __getitem__(self, i: slice) -> list[int]: ...

    def __getitem__(self, i: SupportsIndex | slice) -> int | list[int]:
        return self.tensor.tolist()[i] if isinstance(i, slice) else int(self.tensor[i])

    def __repr__(self) -> str:
        return f"Indices({self.tensor})"


def below_subsets(dataset: Dataset[Any], indices: Tensor) -> tuple[Dataset[Any], Tensor]:
    """Return the dataset below nested Subsets, and the indices of these examples in it."""
    # Not isinstance, as a subclass may override __getitem__, such as with a transform; likewise TensorDataset below.
    while type(dataset) is Subset:
        above = dataset.indices.tensor if isinstance(dataset.indices, Indices) else dataset.indices
        dataset, indices = dataset.dataset, torch.as_tensor(above, device="cpu")[indices]
    return dataset, indices


def collated(dataset: Dataset[Any], places: Tensor, collate: Collate) -> Any:
    """Return a batch of the examples of a dataset at these indices.

    Raises:
        TypeError, ValueError: torch's default_collate cannot make a batch of them.
    """
    if type(dataset) is TensorDataset and collate is default_collate:
        return tuple(tensor[places] for tensor in dataset.tensors)
    numbers = places.tolist()
    at_once = getattr(dataset, "__getitems__", None)  # as in DataLoader
    examples = at_once(numbers) if callable(at_once) else [dataset[i] for i in numbers]
    if collate is not default_collate:
        return collate(examples)
    try:
        return default_collate(examples)
    except (TypeError, RuntimeError, KeyError) as error:
        raise (TypeError if isinstance(error, TypeError) else ValueError)(
            f"examples of {_kind(examples[0])} make no batch: {error}. Pass collate=, a function of a list of examples,"
            " to partnets.chunk (or to the evaluation): transformers' DataCollatorWithPadding, or one with"
            " torch.nn.utils.rnn.pad_sequence, pads to one length. Or let the data set return tensors of one shape:"
            " transform images to tensors, and leave no part of an example None."
        ) from error


def _kind(example: Any) -> str:
    """Return a description of an example's parts, such as (Tensor [3], int)."""
    if isinstance(example, Mapping):
        return "{" + ", ".join(f"{name!r}: {_kind(part)}" for name, part in example.items()) + "}"
    if isinstance(example, tuple | list) and len(example) < 5:
        return "(" + ", ".join(map(_kind, example)) + ")"
    return f"Tensor {list(example.shape)}" if isinstance(example, Tensor) else type(example).__name__


def as_dataset(data: Dataset[Any] | Sequence[Any]) -> Dataset[Any]:
    """Return a map-style dataset with a length: data itself, or the TensorDataset of tensors of equal length.

    A list of examples, each a tuple or a dict, is one too.

    Raises:
        TypeError: data is none of these.
        ValueError: tensors differ in length.
    """
    if isinstance(data, list) and data and all(isinstance(example, tuple | Mapping) for example in data):
        return data
    if isinstance(data, tuple | list):
        if not data or not all(isinstance(tensor, Tensor) and tensor.dim() > 0 for tensor in data):
            kinds = ", ".join(dict.fromkeys(type(part).__name__ for part in data)) or "nothing"
            raise TypeError(
                f"data are a {type(data).__name__} of {kinds}, but must be tensors with at least one dimension, as in"
                " (x, y); torch.as_tensor converts arrays and lists. A list of examples, each a tuple or a dict,"
                " and a Dataset will do too."
            )
        lengths = [len(tensor) for tensor in data]
        if len(set(lengths)) > 1:
            raise ValueError(f"the tensors have {lengths} examples; pass tensors of equal length.")
        return TensorDataset(*data)
    if (cure := _cure(data)) is not None:
        raise TypeError(f"data are a {type(data).__name__}; {cure}")
    return data


def as_tensor(part: Any) -> Tensor:
    """Return a tensor, a NumPy array, a DataFrame or a list as a dense tensor without a gradient.

    Raises:
        TypeError: an array has no numbers, or a tensor is sparse.
        ValueError: a list is not rectangular, or an array has masked entries.
    """
    if hasattr(part, "iloc"):
        part = part.to_numpy()
    if isinstance(part, list) and not any(isinstance(each, Tensor) for each in part):
        part = numpy.asarray(part)
    if isinstance(part, numpy.ndarray):
        if masked := int(numpy.ma.getmaskarray(part).sum()) if isinstance(part, numpy.ma.MaskedArray) else 0:
            raise ValueError(f"data have an array with {masked} masked entries; pass x.filled(...), or leave them out.")
        if part.dtype.kind not in "biufc":
            raise TypeError(
                f"data have an array of {part.dtype}; pass numbers, for labels such as numpy.unique(y,"
                " return_inverse=True)[1]."
            )
        fits = part.flags.writeable and all(stride >= 0 for stride in part.strides) and part.dtype.isnative
        part = part if fits else part.astype(part.dtype.newbyteorder("="))
    tensor = part.detach() if isinstance(part, Tensor) else torch.as_tensor(part, device="cpu")
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch does not compare these
        tensor = tensor.long()
    if tensor.layout != torch.strided:
        raise TypeError(f"data have a tensor of layout {tensor.layout}; pass dense ones, such as x.to_dense().")
    return tensor


def refuse_separate(call: str, separate: tuple[Any, ...]) -> None:
    """Raise TypeError if inputs and targets came as two arguments."""
    if separate:
        raise TypeError(f"inputs and targets are one argument: {call}.")


def _cure(data: Any) -> str | None:
    """Return advice if data are not a map-style dataset, or None."""
    usual = "pass a Dataset with __len__ and __getitem__, or tensors (x, y)"
    if isinstance(data, IterableDataset):
        return f"chunks need random access to examples, not a sequence of them: pass list(dataset); {usual}."
    if isinstance(data, DataLoader):
        return f"pass its data set, loader.dataset, and its options, such as num_workers, to partnets.Trainer; {usual}."
    if hasattr(data, "upto"):
        return f"they are chunks already: pass chunks.dataset; {usual}."
    if isinstance(data, Tensor) or hasattr(data, "__array__"):
        return f"{usual}, such as (torch.as_tensor(x), torch.as_tensor(y)), or a TensorDataset of them."
    if isinstance(data, Mapping):
        return f"pass one data set of a dict of them, such as data['train'], or tensors of its columns; {usual}."
    if isinstance(data, str | bytes):
        return f"a path or text is not read here; {usual}."
    if not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
        return f"{usual}. Convert an iterator, such as a generator, to a list of examples: list(data)."
    return None
