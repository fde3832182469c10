"""A partition as plain values and tensors: what a state_dict holds of it and torch.load reads safely.

Format 2 has a map, format 3 the numbers of units of a nested partition. Format 1 had no `row` and `col`, since there
were no shards: it is read as well.
"""

from __future__ import annotations

import dataclasses

import torch

from partkernels import NestedPartition, Normal, Partition, Stored, Uniform, Zeros

FORMAT, NESTED = 2, 3
FIELDS = {1: {"format", "count", "map", "defaults"}}
FIELDS[FORMAT] = FIELDS[1] | {"row", "col"}
FIELDS[NESTED] = {"format", "count", "row_units", "col_units", "row", "col"}
KINDS = {cls.__name__.lower(): cls for cls in (Zeros, Uniform, Normal, Stored)}


def to_plain(partition: Partition) -> dict:
    """{'format': 2, 'count': int, 'map': uint8 tensor, 'defaults': {...}, 'row': int, 'col': int}.

    'defaults' has their 'kind', a str, and their arguments. A nested partition is {'format': 3, 'count': int,
    'row_units': [[int, ...], ...], 'col_units': [[int, ...], ...], 'row': int, 'col': int}, with n_1..n_C of each
    segment.

    Example:
        >>> to_plain(Partition.random((2, 2), (0.5, 0.5), seed=0, defaults=Uniform(0.5, seed=3)))["defaults"]
        {'kind': 'uniform', 'scale': 0.5, 'seed': 3, 'stream': 0}
        >>> to_plain(Partition.nested((4, 2), (3, 4)))["row_units"]
        [[3, 4]]
    """
    place = {"row": partition.row, "col": partition.col}
    if isinstance(partition, NestedPartition):
        units = {"row_units": partition.row_units, "col_units": partition.col_units}
        plain = {name: [list(ends) for ends in one.segments] for name, one in units.items()}
        return {"format": NESTED, "count": partition.count, **plain, **place}
    defaults = partition.defaults
    arguments = {field.name: getattr(defaults, field.name) for field in dataclasses.fields(defaults)}
    kind = {"kind": type(defaults).__name__.lower()}
    return {
        "format": FORMAT,
        "count": partition.count,
        "map": partition.map,
        "defaults": kind | arguments,
        **place,
    }


def from_plain(plain: dict, own: Partition) -> Partition:
    """The inverse of to_plain, checked against the partition that a layer has.

    Raises:
        TypeError, ValueError: plain is damaged, of another format, or the partition of another layer.

    Example:
        >>> saved, own = (Partition.random((2, 2), (0.5, 0.5), seed=seed) for seed in (0, 1))
        >>> bool((from_plain(to_plain(saved), own).map == saved.map).all())
        True
    """
    if not isinstance(plain, dict) or not (plain.keys() >= FIELDS[1] or plain.keys() >= FIELDS[NESTED]):
        raise TypeError("this is no saved partition; pass the state_dict of a partitioned layer.")
    if FIELDS.get(plain["format"]) != plain.keys():
        raise ValueError(
            f"the partition was saved in format {plain['format']}, with {', '.join(sorted(plain))}; this version reads"
            f" formats {', '.join(map(str, FIELDS))}."
        )
    if plain["count"] != own.count:
        raise ValueError(
            f"the saved layer has {plain['count']} partitions and this one {own.count}; partition this model with the"
            " proportions of the saved one."
        )
    is_nested = isinstance(own, NestedPartition)
    if is_nested != (plain["format"] == NESTED):
        saved, here = ("'weight' or 'node'", "'nested'") if is_nested else ("'nested'", "'weight' or 'node'")
        raise ValueError(
            f"the saved partition is of the scheme {saved}, and this one of {here}: different weights are live in a"
            f" subnetwork. Partition this model with scheme={saved}, as the saved one."
        )
    if is_nested:
        if plain != to_plain(own):
            raise ValueError(
                f"the saved units are {plain['row_units']} by {plain['col_units']}, and this layer's {own}; partition"
                " this model with the proportions, proportions_of and example of the saved one."
            )
        return own
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
    return Partition(own.shape, own.count, plain["map"], KINDS[kind](**arguments), *place)
