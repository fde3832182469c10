"""chunk: the training data in C disjoint parts, and how they are sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from partkernels.defaults import check_seed
from partkernels.partition import sizes
from partnets.utils.checks import check_at_least


class Chunks:
    """A dataset in C disjoint chunks D_1..D_C; chunks[k] is D_k, a Subset. Make one with partnets.chunk.

    Iterating gives D_1, ..., D_C; len(chunks) is C.

    Attributes:
        dataset: all of the data, D_1:C.
        sizes: the number of examples of each chunk.
        collate: makes a batch of a list of examples: torch's default_collate, unless another was given to
            partnets.chunk. The tensors of a TensorDataset are indexed without it.

    Raises:
        IndexError: a chunk's number is not in 1..C.

    Example:
        >>> chunks = chunk(TensorDataset(torch.arange(10)), (0.8, 0.2), seed=0)
        >>> chunks.sizes, len(chunks[2]), len(chunks.upto(2))
        ([8, 2], 2, 10)
    """

    def __init__(
        self, dataset: Dataset, order: Tensor, sizes: Sequence[int], collate: Callable[[list], Any] = default_collate
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.sizes = list(sizes)
        # D_k is order[ends[k - 1] : ends[k]], and D_1:k a prefix.
        self.order = order
        self._examples, self._places = below_subsets(dataset, order)
        self._ends = [0, *torch.tensor(self.sizes).cumsum(0).tolist()]

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update({"collate": default_collate} | state)  # older pickles have none

    @property
    def count(self) -> int:
        """C, the number of chunks."""
        return len(self.sizes)

    @property
    def proportions(self) -> tuple[float, ...]:
        """u_1..u_C (Appendix I.1): each chunk's actual share of the examples."""
        return tuple(size / len(self.order) for size in self.sizes)

    def indices(self, k: int) -> Tensor:
        """The indices of D_k's examples in the dataset, int64 [sizes[k - 1]]."""
        self._check(k)
        return self.order[self._ends[k - 1] : self._ends[k]]

    def upto(self, k: int) -> Subset:
        """D_1:k."""
        self._check(k)
        return Subset(self.dataset, self.order[: self._ends[k]].tolist())

    def sample(self, k: int, batch_size: int, generator: Generator | None = None):
        """A batch from D_k, uniformly with replacement (Appendix I.1, hyperparameters).

        Args:
            k: 1..C.
            batch_size: the number of examples, at least 1.
            generator: a CPU generator; torch's global one if None.

        Returns:
            What `collate` makes of the examples; a tuple of tensors for a TensorDataset.

        Example:
            >>> chunks = chunk((torch.arange(10), torch.arange(10)), (0.8, 0.2))
            >>> [part.shape for part in chunks.sample(2, batch_size=5)]
            [torch.Size([5]), torch.Size([5])]
        """
        self._check(k)
        return self._sample(self._ends[k - 1], self._ends[k], batch_size, generator)

    def sample_upto(self, k: int, batch_size: int, generator: Generator | None = None):
        """A batch from D_1:k, uniformly with replacement (Appendix I.1, parameters). Arguments as for sample."""
        self._check(k)
        return self._sample(0, self._ends[k], batch_size, generator)

    def batches(self, k: int, batch_size: int) -> Iterator:
        """D_k in batches, each example once, in a fixed order; the last batch may be smaller.

        Example:
            >>> chunks = chunk(TensorDataset(torch.arange(10)), (0.5, 0.5))
            >>> [len(x) for (x,) in chunks.batches(1, batch_size=2)]
            [2, 2, 1]
        """
        return batches(self.dataset, batch_size, self.indices(k), self.collate)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> Subset:
        return Subset(self.dataset, self.indices(k).tolist())

    def __iter__(self) -> Iterator[Subset]:
        return (self[k] for k in range(1, self.count + 1))

    def __repr__(self) -> str:
        return f"Chunks(sizes={self.sizes})"

    def _check(self, k: int) -> None:
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= self.count:
            raise IndexError(f"chunk {k!r}, but there are {self.count} chunks; pass an int in 1..{self.count}.")

    def _sample(self, start: int, end: int, batch_size: int, generator: Generator | None):
        check_at_least(1, batch_size=batch_size)
        places = self._places[start + self._draws(end - start, batch_size, generator)]
        return _collated(self._examples, places, self.collate)

    def _draws(self, count: int, batch_size: int, generator: Generator | None) -> Tensor:
        return torch.randint(count, (batch_size,), generator=generator, device="cpu")


def batches(
    dataset: Dataset, batch_size: int, indices: Tensor | None = None, collate: Callable[[list], Any] = default_collate
) -> Iterator:
    """The examples at these indices, or all, in batches and in this order; the last may be smaller."""
    check_at_least(1, batch_size=batch_size)
    indices = torch.arange(len(dataset), device="cpu") if indices is None else indices
    dataset, indices = below_subsets(dataset, indices)
    return (_collated(dataset, part, collate) for part in indices.split(batch_size))


def below_subsets(dataset: Dataset, indices: Tensor) -> tuple[Dataset, Tensor]:
    """The dataset below Subsets, and where these examples are in it."""
    # A subclass may do more in __getitem__, as to transform an example; the same goes for TensorDataset below.
    while type(dataset) is Subset:
        dataset, indices = dataset.dataset, torch.as_tensor(dataset.indices, device="cpu")[indices]
    return dataset, indices


def _collated(dataset: Dataset, indices: Tensor, collate: Callable[[list], Any]):
    """The examples of a dataset at these indices as a batch."""
    if type(dataset) is TensorDataset:
        return tuple(tensor[indices] for tensor in dataset.tensors)
    return collate([dataset[i] for i in indices.tolist()])


def as_dataset(data: Dataset | Sequence[Tensor]) -> Dataset:
    """A map-style dataset with a length: data itself, or the TensorDataset of tensors of equal length.

    Raises:
        TypeError: data is neither.
        ValueError: tensors differ in length.
    """
    if isinstance(data, tuple | list):
        if not data or not all(isinstance(tensor, Tensor) and tensor.dim() > 0 for tensor in data):
            raise TypeError("data must be tensors with at least one dimension, as in (x, y), or a Dataset.")
        lengths = [len(tensor) for tensor in data]
        if len(set(lengths)) > 1:
            raise ValueError(f"the tensors have {lengths} examples; pass tensors of equal length.")
        return TensorDataset(*data)
    array = hasattr(data, "__array__") or isinstance(data, Mapping)
    if array or not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
        raise TypeError(
            f"data are a {type(data).__name__}; pass a Dataset with __len__ and __getitem__, or tensors (x, y)."
        )
    return data


def chunk(
    dataset: Dataset | Sequence[Tensor],
    proportions: Sequence[float],
    *,
    seed: int = 0,
    collate: Callable[[list], Any] = default_collate,
) -> Chunks:
    """Splits a dataset at random into C disjoint chunks.

    Args:
        dataset: a map-style torch Dataset with a length, or a tuple or list of tensors whose first dimension is the
            example's, which becomes a TensorDataset and is indexed without collating.
        proportions: C numbers that sum to 1; sizes follow by largest remainder.
        seed: an int in [0, 2**63) that decides the split.
        collate: makes a batch of a list of examples, as a DataLoader's collate_fn does: for padding, for instance.

    Raises:
        TypeError: dataset is neither.
        ValueError: tensors differ in length, the proportions or the seed are invalid, or a chunk would be empty.

    Example:
        >>> chunk((torch.zeros(1000, 3), torch.zeros(1000)), (0.8, 0.1, 0.1))
        Chunks(sizes=[800, 100, 100])
    """
    dataset = as_dataset(dataset)
    check_seed("seed", seed)
    total = len(dataset)
    split = sizes(total, proportions)
    if 0 in split:
        raise ValueError(
            f"chunk {split.index(0) + 1} of {total} examples in proportions {tuple(proportions)} would be empty; give"
            " each chunk at least one example."
        )
    order = torch.randperm(total, generator=Generator().manual_seed(seed), device="cpu")
    return Chunks(dataset, order, split, collate)


def draw_k(u: Sequence[float], generator: Generator, *, start: int = 1) -> int:
    """A chunk's number k, start..C, with probabilities proportional to u_k (Appendix I.1).

    Args:
        u: C numbers that are not negative, those from `start` on of a sum above 0.
        generator: a CPU generator.
        start: 1 for a step of w, 2 for a step of ψ.

    Example:
        >>> draw_k((0.5, 0.0, 0.5), Generator().manual_seed(0), start=2)
        3
    """
    return start + int(torch.multinomial(torch.tensor(u[start - 1 :], device="cpu"), 1, generator=generator))


def check_unseen(chunks: Chunks) -> None:
    """Raises ValueError unless there is a chunk that some subnetwork has not seen."""
    if chunks.count < 2:
        raise ValueError("there is 1 chunk; L_ML needs at least 2, as in chunk(dataset, (0.8, 0.2)).")
