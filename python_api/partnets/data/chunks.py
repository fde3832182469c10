"""chunk: the split of training data into C disjoint chunks, and their sampling."""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy
import torch
from torch import Generator, Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from partkernels.arguments import check_seed, sizes
from partnets.data.examples import Collate, Indices, as_dataset, below_subsets, collated, refuse_separate
from partnets.data.fetching import Batches, Request, fetched
from partnets.data.splitting import codes, given, grouped, stratified
from partnets.utils.checks import check_at_least

# Number of examples in a fingerprint.
DIGESTED = 64
# Number of tree leaves of each example in a fingerprint: numbers, texts and tensors.
LEAVES = 64


class Chunks:
    """A dataset in C disjoint chunks D_1..D_C; chunks[k] is D_k, a Subset. Make one with partnets.chunk.

    Iteration yields D_1, ..., D_C; len(chunks) is C.

    Attributes:
        dataset: all of the data, D_1:C.
        sizes: the number of examples of each chunk.
        ranks: the number of processes that share each batch; above 1 with partnets.distributed.share.
        collate: makes a batch of a list of examples: torch's default_collate, unless another was passed to
            partnets.chunk. With the default, the tensors of a TensorDataset are indexed without collating.

    Raises:
        IndexError: a chunk's number is not in 1..C.

    Example:
        >>> chunks = chunk(TensorDataset(torch.arange(10)), (0.8, 0.2), seed=0)
        >>> chunks.sizes, len(chunks[2]), len(chunks.upto(2))
        ([8, 2], 2, 10)
    """

    ranks = 1

    def __init__(
        self, dataset: Dataset[Any], order: Tensor, sizes: Sequence[int], collate: Collate = default_collate
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.sizes = list(sizes)
        # D_k is order[ends[k - 1] : ends[k]], and D_1:k a prefix.
        self.order = order
        self._examples, self._places = below_subsets(dataset, order)
        self._ends = [0, *itertools.accumulate(self.sizes)]

    @property
    def proportions(self) -> tuple[float, ...]:
        """Each chunk's actual share of the examples, u_1..u_C (Appendix I.1)."""
        return tuple(size / len(self.order) for size in self.sizes)

    @cached_property
    def fingerprint(self) -> str:
        """An identifier of these chunks: a hexadecimal digest of the split, a hyphen, and one of up to 64 examples.

        It is the same in every process and on every machine. The second digest is empty for a Dataset, which may
        transform its examples, and for a list of other things than tensors, arrays, numbers and text. See is_of.

        Example:
            >>> x = torch.arange(10)
            >>> first, again, other = (chunk((x,), (0.8, 0.2), seed=seed).fingerprint for seed in (0, 0, 1))
            >>> first == again, first == other
            (True, False)
        """
        found = hashlib.blake2b(self.order.contiguous().numpy(), digest_size=16)
        found.update(repr((self.sizes, len(self.dataset))).encode())
        return f"{found.hexdigest()}-{digest(self) or ''}"

    def is_of(self, fingerprint: str) -> bool:
        """Return whether a fingerprint has the same split as these chunks, and the same data if both have a digest.

        Example:
            >>> x = torch.arange(10)
            >>> class Squares(Dataset):
            ...     def __len__(self):
            ...         return 10
            ...     def __getitem__(self, i):
            ...         return x[i] ** 2
            >>> chunks, squares = chunk((x,), (0.8, 0.2)), chunk(Squares(), (0.8, 0.2))
            >>> squares.is_of(chunks.fingerprint), squares.fingerprint == chunks.fingerprint
            (True, False)
        """
        (split, _, data), (their_split, _, theirs) = self.fingerprint.partition("-"), fingerprint.partition("-")
        return split == their_split and (data == theirs or not (data and theirs))

    def indices(self, k: int) -> Tensor:
        """Return the indices of D_k's examples in the dataset, int64 [sizes[k - 1]]."""
        self._check(k)
        return self.order[self._ends[k - 1] : self._ends[k]]

    def upto(self, k: int) -> Subset[Any]:
        """Return D_1:k."""
        self._check(k)
        return Subset(self.dataset, Indices(self.order[: self._ends[k]]))

    def sample(self, k: int, batch_size: int, generator: Generator | None = None) -> Any:
        """Return a batch from D_k, drawn uniformly with replacement (Appendix I.1, hyperparameters).

        Args:
            k: 1..C.
            batch_size: the number of examples, at least 1.
            generator: a CPU generator; torch's global one if None.

        Returns:
            The examples collated by `collate`; a tuple of tensors for a TensorDataset.

        Example:
            >>> chunks = chunk((torch.arange(10), torch.arange(10)), (0.8, 0.2))
            >>> [part.shape for part in chunks.sample(2, batch_size=5)]
            [torch.Size([5]), torch.Size([5])]
        """
        return self.fetch(self.draw(k, batch_size, generator))

    def sample_upto(self, k: int, batch_size: int, generator: Generator | None = None) -> Any:
        """Return a batch from D_1:k, drawn uniformly with replacement (Appendix I.1, parameters); see sample."""
        return self.fetch(self.draw_upto(k, batch_size, generator))

    def draw(self, k: int, batch_size: int, generator: Generator | None = None) -> Tensor:
        """Return the indices of a batch from D_k for `fetch`, int64 [batch_size]; see sample."""
        self._check(k)
        return self._drawn(self._ends[k - 1], self._ends[k], batch_size, generator)

    def draw_upto(self, k: int, batch_size: int, generator: Generator | None = None) -> Tensor:
        """Return the indices of a batch from D_1:k for `fetch`, int64 [batch_size]; see sample."""
        self._check(k)
        return self._drawn(0, self._ends[k], batch_size, generator)

    def fetch(self, drawn: Tensor) -> Any:
        """Return the batch for indices from draw or draw_upto."""
        return collated(self._examples, drawn, self.collate)

    def fetch_as_asked(self, wanted: Request, loading: Mapping[str, Any]) -> Any:
        """Return the batch of a request, fetched in this process, as worker processes with these options would."""
        return Batches(self._examples, self.collate, loading)[wanted.places.tolist(), wanted.seed]

    def fetched(self, requests: Iterator[Request], loading: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the batches of requests, by a DataLoader with these options. Close it to end its processes."""
        return fetched(self._examples, self.collate, requests, loading)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, k: int) -> Subset[Any]:
        return Subset(self.dataset, Indices(self.indices(k)))

    def __iter__(self) -> Iterator[Subset[Any]]:
        return (self[k] for k in range(1, len(self) + 1))

    def __repr__(self) -> str:
        return f"Chunks(sizes={self.sizes})"

    def _check(self, k: int) -> None:
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= len(self):
            raise IndexError(f"chunk {k!r}, but there are {len(self)} chunks; pass an int in 1..{len(self)}.")

    def _drawn(self, start: int, end: int, batch_size: int, generator: Generator | None) -> Tensor:
        check_at_least(1, batch_size=batch_size)
        return self._places[start + self._draws(end - start, batch_size, generator)]

    def _draws(self, count: int, batch_size: int, generator: Generator | None) -> Tensor:
        return torch.randint(count, (batch_size,), generator=generator, device="cpu")


def digest(chunks: Chunks) -> str | None:
    """Return a hash of up to DIGESTED examples, by which Chunks.is_of detects other or reordered data.

    Return None for a Dataset, which may transform its examples at random, and for examples of other things than
    tensors, arrays, numbers and text. A list has the hash of a TensorDataset of the same examples.
    """
    few = torch.linspace(0, len(chunks.order) - 1, DIGESTED, dtype=torch.float64, device="cpu").long()
    dataset, places = below_subsets(chunks.dataset, chunks.order[few])
    if type(dataset) is TensorDataset:
        leaves = dataset[places]
    elif type(dataset) in (list, tuple):
        examples = [tree_leaves(dataset[i])[:LEAVES] for i in places.tolist()]
        leaves = [leaf for part in itertools.zip_longest(*examples) for leaf in part]  # as in a TensorDataset
    else:
        return None
    found = hashlib.blake2b(digest_size=16)
    try:
        for leaf in leaves:
            found.update(_content(leaf))
    except Exception:  # examples may be anything; they then have no digest
        return None
    return found.hexdigest()


def _content(leaf: Any) -> bytes:
    """Return the bytes of a tensor, a number, text, an array or an image; raise TypeError for anything else."""
    if isinstance(leaf, Tensor):
        return leaf.detach().cpu().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy().tobytes()
    if leaf is None or isinstance(leaf, str | bytes):
        return repr(leaf).encode()
    array = numpy.asarray(leaf)
    if array.dtype.hasobject:
        raise TypeError("these bytes are addresses")
    return array.tobytes()


def chunk(
    dataset: Dataset[Any] | Sequence[Any],
    proportions: Sequence[float] | None = None,
    *separate: Any,
    seed: int = 0,
    groups: Any = None,
    stratify: Any = None,
    indices: Sequence[Any] | None = None,
    collate: Collate = default_collate,
) -> Chunks:
    """Split a dataset into C disjoint chunks, at random or by `indices`.

    This takes 8 bytes for each example and reads none.

    Args:
        dataset: a map-style torch Dataset with a length, which may return dicts, as Hugging Face's do; a list of
            examples, each a tuple or a dict; or a tuple or list of tensors with the examples in the first dimension,
            which becomes a TensorDataset and is indexed without collating.
        proportions: C numbers that sum to 1; sizes follow by largest remainder.
        seed: an int in [0, 2**63), seed of the split.
        groups: a label for each example, such as its patient or video: examples of one group go to one chunk. Sizes
            are near the proportions, and every chunk gets some large and some small groups.
        stratify: a label for each example, such as its class: each chunk gets its share of each class, rounded down or
            up; together with groups, as near as groups allow.
        indices: C disjoint sequences of example indices, instead of proportions: a custom split, such as one by time.
            Examples outside of them are left out.
        collate: makes a batch of a list of examples, as a DataLoader's collate_fn does, such as for padding.

    Raises:
        TypeError: dataset, labels or indices have none of these types.
        ValueError: tensors differ in length, the proportions or the seed are invalid, a chunk would be empty, there
            are fewer groups than chunks, labels are not one for each example, or indices overlap or are out of range.

    Warns:
        UserWarning: because of groups, a chunk's size differs from its proportion by more than a tenth.

    Example:
        >>> chunk((torch.zeros(1000, 3), torch.zeros(1000)), (0.8, 0.1, 0.1))
        Chunks(sizes=[800, 100, 100])
        >>> patients = [i // 5 for i in range(100)]
        >>> split = chunk((torch.arange(100),), (0.8, 0.2), groups=patients)
        >>> split, {patients[i] for i in split.indices(1)} & {patients[i] for i in split.indices(2)}
        (Chunks(sizes=[80, 20]), set())
    """
    refuse_separate("chunk((x, y), proportions)", separate)
    dataset = as_dataset(dataset)
    check_seed("seed", seed)
    if indices is not None:
        if any(each is not None for each in (proportions, groups, stratify)):
            raise ValueError("indices already define the split; leave proportions, groups and stratify out.")
        parts = given(indices, len(dataset))
        return Chunks(dataset, torch.cat(parts), [len(part) for part in parts], collate)
    if proportions is None:
        raise ValueError("there are neither proportions nor indices; pass proportions, such as (0.8, 0.1, 0.1).")
    total = len(dataset)
    wanted = sizes(total, proportions)
    _check_none_empty(wanted, proportions)
    generator = Generator().manual_seed(seed)
    order = torch.randperm(total, generator=generator, device="cpu")
    classes = None if stratify is None else codes("stratify", stratify, total)
    if groups is not None:
        numbers = codes("groups", groups, total)
        found = grouped(numbers, classes, proportions, generator)
    elif classes is not None:
        found = stratified(classes, proportions, generator)
    else:
        return Chunks(dataset, order, wanted, collate)
    split = found.bincount(minlength=len(wanted)).tolist()
    _check_none_empty(split, proportions)
    off = max(abs(size - share) - max(share / 10, 1) for size, share in zip(split, wanted, strict=True))
    if groups is not None and off > 0:
        warnings.warn(
            f"the chunks have {split} examples where the proportions ask for {wanted}: groups stay whole, and the"
            f" largest has {int(numbers.bincount().max())}. Pass other proportions, or smaller groups.",
            stacklevel=2,
        )
    return Chunks(dataset, order[found[order].argsort(stable=True)], split, collate)


def _check_none_empty(split: list[int], proportions: Sequence[float]) -> None:
    if 0 in split:
        raise ValueError(
            f"chunk {split.index(0) + 1} of {sum(split)} examples in proportions {tuple(proportions)} would be empty;"
            " give each chunk at least one example."
        )


def draw_k(u: Sequence[float], generator: Generator, *, start: int = 1) -> int:
    """Draw the number k of a step, from start to C, with probabilities in proportion to u_k (the paper, Appendix I.1).

    Args:
        u: u_1..u_C, not negative, such as the chunks' proportions; those from `start` on have a sum above 0.
        generator: a CPU generator.
        start: 1 for a step of w, 2 for a step of ψ.

    Example:
        >>> draw_k((0.5, 0.0, 0.5), Generator().manual_seed(0), start=2)
        3
    """
    return start + int(torch.multinomial(torch.tensor(u[start - 1 :], device="cpu"), 1, generator=generator))


def divided(name: str, batch_size: int, shares: Mapping[int, float]) -> dict[int, int]:
    """Divide a batch among all k by their shares, at least one example each; k with a share of 0 are left out.

    Raises:
        ValueError: the batch has too few examples.

    Example:
        >>> divided("batch_size", 20, {1: 0.8, 2: 0.1, 3: 0.1})
        {1: 16, 2: 2, 3: 2}
    """
    whole = sum(shares.values())
    counts = zip(shares, sizes(batch_size, [share / whole for share in shares.values()]), strict=True)
    parts = {k: examples for k, examples in counts if shares[k]}
    if missing := [k for k, examples in parts.items() if not examples]:
        raise ValueError(
            f"{name}={batch_size}, divided by {', '.join(f'{share:g}' for share in shares.values())}, leaves no example"
            f" for k={missing[0]}; pass a larger one, or leave one_pass out."
        )
    return parts


def check_chunks(chunks: Chunks) -> None:
    """Raise TypeError unless the data have been split into chunks."""
    if not isinstance(chunks, Chunks):
        raise TypeError(
            f"the data are a {type(chunks).__name__}; split them first, with partnets.chunk(data, proportions)."
        )


def check_unseen(chunks: Chunks) -> None:
    """Raise ValueError unless some subnetwork has a held-out chunk, and TypeError as in check_chunks."""
    check_chunks(chunks)
    if len(chunks) < 2:
        raise ValueError("there is 1 chunk; L_ML needs at least 2, as in chunk(dataset, (0.8, 0.2)).")
