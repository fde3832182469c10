"""Splits of examples into chunks: by groups, by classes, or by given indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Generator, Tensor


def codes(name: str, labels: Any, total: int) -> Tensor:
    """Return a number for each example, int64 [total]: equal for equal labels, 0, 1, ... in the order of appearance.

    Args:
        name: name of the argument, for error messages.
        labels: a tensor, an array, a Series or a list, of numbers or other hashable values.

    Raises:
        TypeError: labels are none of these.
        ValueError: the number of labels differs from total, or one is None or NaN.
    """
    one_each = f"pass one label for each of the {total} examples"
    if not isinstance(labels, Sized) or isinstance(labels, str | bytes | Mapping | set) or hasattr(labels, "columns"):
        raise TypeError(f"{name} is a {type(labels).__name__}; {one_each}, as a list, an array or a tensor.")
    shape = list(getattr(labels, "shape", [len(labels)]))
    if shape != [total]:
        raise ValueError(f"{name} has {'x'.join(map(str, shape))} labels; {one_each}.")
    numbers: dict = {}
    try:
        found = [numbers.setdefault(label, len(numbers)) for label in _listed(labels)]
    except TypeError as error:
        raise TypeError(f"{name} has labels that can be no dict's keys ({error}); {one_each}, as a tuple.") from None
    for missing in numbers:
        if missing is None or missing != missing:
            first = found.index(numbers[missing])
            raise ValueError(f"{name} has no label but {missing} for example {first}; {one_each}.")
    return torch.tensor(found, device="cpu")


def _listed(labels: Any) -> list:
    """Return the labels as Python values, so that equal labels are equal dict keys in every container."""
    if hasattr(labels, "tolist"):
        return labels.tolist()
    return [label.item() if hasattr(label, "item") else label for label in labels]


def _shuffled(count: int, generator: Generator) -> Tensor:
    return torch.randperm(count, generator=generator, device="cpu")


def grouped(groups: Tensor, classes: Tensor | None, proportions: Sequence[float], generator: Generator) -> Tensor:
    """Return the chunk of each example, int64 from 0, with whole groups and sizes near the proportions, per class too.

    Groups are assigned from the largest to the smallest, each to the chunk with the largest deficit so far, so every
    chunk gets some large and some small groups.

    Args:
        groups, classes: numbers of each example, int64 from 0, each number at least once; classes may be None.

    Raises:
        ValueError: there are fewer groups than chunks.
    """
    sizes = groups.bincount()
    count, chunks = len(sizes), range(len(proportions))
    if count < len(chunks):
        raise ValueError(f"there are {count} groups for {len(chunks)} chunks; pass at least one for each.")
    kinds = 0 if classes is None else int(classes.max()) + 1
    # For each group, (class, number of its examples) pairs; the last kind counts all examples.
    parts = [[(kinds, size)] for size in sizes.tolist()]
    if classes is not None:
        pairs, numbers = (groups * kinds + classes).unique(return_counts=True)
        for pair, number in zip(pairs.tolist(), numbers.tolist(), strict=True):
            parts[pair // kinds].append((pair % kinds, number))
    order = _shuffled(count, generator)
    order = order[sizes[order].argsort(descending=True, stable=True)].tolist()
    surplus = [[0.0] * len(chunks) for _ in range(kinds + 1)]
    found, empty = [0] * count, set(chunks)
    for left, group in zip(range(count, 0, -1), order, strict=True):
        for kind, number in parts[group]:
            for j in chunks:
                surplus[kind][j] -= number * proportions[j]
        missing = [sum(number * surplus[kind][j] for kind, number in parts[group]) for j in chunks]
        chosen = min(sorted(empty) if left == len(empty) else chunks, key=missing.__getitem__)
        empty.discard(chosen)
        found[group] = chosen
        for kind, number in parts[group]:
            surplus[kind][chosen] += number
    return torch.tensor(found, device="cpu")[groups]


def stratified(classes: Tensor, proportions: Sequence[float], generator: Generator) -> Tensor:
    """Return the chunk of each example, int64 from 0: each chunk's share of each class and in all, rounded up or down.

    Args:
        classes: class of each example, int64 from 0, each number at least once.

    Raises:
        ValueError: all examples have different classes.
    """
    shares = torch.tensor([float(share) for share in proportions], dtype=torch.float64, device="cpu")
    numbers = classes.bincount()
    if len(numbers) == len(classes) > 1:
        raise ValueError(
            f"stratify has {len(classes)} labels that all differ; pass classes, or bins of numbers, such as those of"
            " torch.bucketize."
        )
    exact = numbers[:, None] * shares
    parts = (exact + 1e-9).floor().long()
    surplus = (parts - exact).tolist()
    rest = (numbers - parts.sum(1)).tolist()
    of_all = [0.0] * len(shares)
    for kind in _shuffled(len(numbers), generator).tolist():
        of_all = [sum(both) for both in zip(of_all, surplus[kind], strict=True)]
        # Without the class's own surplus, the first chunk would get all remainders if each class has one example.
        both = [a + b for a, b in zip(of_all, surplus[kind], strict=True)]
        rounded = [j for j in range(len(shares)) if surplus[kind][j] < -1e-9]
        for j in sorted(rounded, key=both.__getitem__)[: rest[kind]]:
            parts[kind, j] += 1
            of_all[j] += 1
    order = _shuffled(len(classes), generator)
    order = order[classes[order].argsort(stable=True)]
    found = torch.empty_like(classes)
    found[order] = torch.arange(len(shares), device="cpu").repeat(len(numbers)).repeat_interleave(parts.flatten())
    return found


def given(indices: Any, total: int) -> list[Tensor]:
    """Return the checked indices of each chunk's examples, int64.

    Raises:
        TypeError: indices are not sequences of ints.
        ValueError: a chunk is empty, an index is out of range, or an index occurs twice.
    """
    cure = "pass a sequence for each chunk, of the indices of its examples, as [range(0, 800), range(800, 1000)]"
    if isinstance(indices, Mapping | str) or not isinstance(indices, Sized) or not len(indices):
        raise TypeError(f"indices is a {type(indices).__name__}; {cure}.")
    found = [_integers(k, part, cure) for k, part in enumerate(indices, start=1)]
    seen = torch.zeros(total, dtype=torch.uint8, device="cpu")
    for k, part in enumerate(found, start=1):
        if not len(part):
            raise ValueError(f"indices of chunk {k} are empty; give each chunk at least one example.")
        if len(outside := part[(part < 0) | (part >= total)]):
            raise ValueError(f"indices of chunk {k} have {int(outside[0])}; there are examples 0..{total - 1}.")
        if len(again := part[seen[part] > 0]):
            example, first = int(again[0]), int(seen[again[0]])
            raise ValueError(f"example {example} is in chunk {first} and in chunk {k}; chunks are disjoint.")
        values, counts = part.unique(return_counts=True)
        if len(twice := values[counts > 1]):
            raise ValueError(f"example {int(twice[0])} is in chunk {k} more than once; pass each index once.")
        seen[part] = k  # at most 256 chunks
    return found


def _integers(k: int, part: Any, cure: str) -> Tensor:
    try:
        found = torch.as_tensor(part if hasattr(part, "dtype") else list(part), device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"indices of chunk {k} are a {type(part).__name__}; {cure}.") from error
    if found.dim() == 1 and not len(found):
        return found.long()
    if found.dim() != 1 or found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        kind = f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
        raise TypeError(f"indices of chunk {k} are {kind}; {cure}; for a mask, mask.nonzero()[:, 0].")
    return found.long()
