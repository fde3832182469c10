"""A partition as plain values and tensors, format 2: what a state_dict holds of it and torch.load reads safely.

Format 1 had no `row` and `col`, since there were no shards: it is read as well.
"""

from __future__ import annotations

import dataclasses

import torch

from partkernels import NestedPartition, Normal, Partition, Stored, Uniform, Zeros

FORMAT = 2
FIELDS = {1: {"format", "count", "map", "defaults"}}
FIELDS[FORMAT] = FIELDS[1] | {"row", "col"}
KINDS = {cls.__name__.lower(): cls for cls in (Zeros, Uniform, Normal, Stored)}


def to_plain(partition: Partition) -> dict:
    """{'format': 2, 'count': int, 'map': uint8 tensor, 'defaults': {...}, 'row': int, 'col': int}.

    'defaults' has their 'kind', a str, and their arguments.

    Raises:
        TypeError: the partition is nested, which no format has yet.

    Example:
        >>> to_plain(Partition.random((2, 2), (0.5, 0.5), seed=0, defaults=Uniform(0.5, seed=3)))["defaults"]
        {'kind': 'uniform', 'scale': 0.5, 'seed': 3, 'stream': 0}
    """
    if isinstance(partition, NestedPartition):
        raise TypeError("a nested partition cannot be saved yet; give the layer its explicit() one.")
    defaults = partition.defaults
    arguments = {field.name: getattr(defaults, field.name) for field in dataclasses.fields(defaults)}
    kind = {"kind": type(defaults).__name__.lower()}
    return {
        "format": FORMAT,
        "count": partition.count,
        "map": partition.map,
        "defaults": kind | arguments,
        "row": partition.row,
        "col": partition.col,
    }


def from_plain(plain: dict, shape: tuple[int, ...], count: int) -> Partition:
    """The inverse of to_plain, checked against the weight's shape and the layer's number of partitions.

    Raises:
        TypeError, ValueError: plain is damaged, of another format, or the partition of another layer.

    Example:
        >>> partition = Partition.random((2, 2), (0.5, 0.5), seed=0)
        >>> bool((from_plain(to_plain(partition), (2, 2), 2).map == partition.map).all())
        True
    """
    if not isinstance(plain, dict) or not plain.keys() >= FIELDS[1]:
        raise TypeError("this is no saved partition; pass the state_dict of a partitioned layer.")
    if FIELDS.get(plain["format"]) != plain.keys():
        raise ValueError(
            f"the partition was saved in format {plain['format']}, with {', '.join(sorted(plain))}; this version reads"
            f" formats 1 and {FORMAT}."
        )
    if plain["count"] != count:
        raise ValueError(
            f"the saved layer has {plain['count']} partitions and this one {count}; partition this model with the"
            " proportions of the saved one."
        )
    if not isinstance(plain["defaults"], dict):
        raise TypeError(
            f"the saved defaults are a {type(plain['defaults']).__name__}; they must be a dict with a kind."
        )
    arguments = dict(plain["defaults"])
    kind = arguments.pop("kind", None)
    if kind not in tuple(KINDS):
        raise ValueError(f"the saved defaults are of the kind {kind!r}; known are {', '.join(KINDS)}.")
    expected = [field.name for field in dataclasses.fields(KINDS[kind])]
    if sorted(arguments) != sorted(expected):
        raise ValueError(
            f"the saved {kind} defaults have {', '.join(arguments)}; they must have {', '.join(expected)}."
        )
    if not isinstance(plain["map"], torch.Tensor):
        raise TypeError(f"the saved map is a {type(plain['map']).__name__}; it must be a torch.uint8 tensor.")
    place = plain.get("row", 0), plain.get("col", 0)
    return Partition(shape, count, plain["map"], KINDS[kind](**arguments), *place)
