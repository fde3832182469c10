"""explain_partition: a table of the shape and active entries of each weight in each subnetwork."""

from __future__ import annotations

import itertools

from torch import nn

from partnets.subnetworks.parameters import partitioned_parameters
from partnets.subnetworks.state import num_partitions, state_of


def explain_partition(model: nn.Module) -> str:
    """Return a table of a model's partitioned weights.

    Its columns: the weight; its shape; for nested channels, the shapes that subnetworks 1..C compute with; and the
    share of its entries in partitions 1..k, for k = 1..C. Inactive entries of weights that are not nested are computed
    with as well, at their defaults.

    Raises:
        ValueError: the model is not partitioned.

    Example:
        >>> import partnets
        >>> model = partnets.partition(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), (0.5, 0.5))
        >>> print(explain_partition(model))
        weight    shape  computed with  active entries
        0.weight  3x4    whole          50% 100%
        2.weight  2x3    whole          50% 100%
        all                             50% 100%
    """
    count, paths = num_partitions(model), {module: path for path, module in model.named_modules()}
    rows, total = [("weight", "shape", "computed with", "active entries")], [0] * count
    for one in partitioned_parameters(model):
        if one.partition is None or one.parameter.dim() < 2:
            continue
        active = list(itertools.accumulate(one.partition.sizes()))
        total = [a + b for a, b in zip(total, active, strict=True)]
        narrow = state_of(one.module).narrow
        shapes = "whole"
        if narrow is not None and one.name in narrow.owners:
            empty = one.parameter.detach().to("meta")
            shapes = " ".join(_shape(narrow.take(empty, one.name, k).shape) for k in range(1, count + 1))
        name = f"{paths[one.module]}.{one.name}".lstrip(".")
        rows.append((name, _shape(one.parameter.shape), shapes, _shares(active)))
    rows.append(("all", "", "", _shares(total)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _shape(shape) -> str:
    return "x".join(map(str, shape))


def _shares(active: list[int]) -> str:
    return " ".join(f"{number / max(active[-1], 1):.0%}" for number in active)
