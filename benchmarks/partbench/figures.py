"""Figures: what records say, as a table of estimates beside the peer that everything is held against."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from partbench.measuring.estimates import Estimate, passes, ratios
from partbench.results import Record

COLUMNS = ("peer", "record", "key", "value", "ratio", "faster")
# Of cases, in any suite.
ENTRIES = (
    "operator",
    "work",
    "shape",
    "dtype",
    "device",
    "proportions",
    "bits",
    "defaults",
    "active",
    "model",
    "batch",
)
ENTRIES += ("optimizer", "update", "figure")


def figures(records: Iterable[Record], suite: str) -> pd.DataFrame:
    """A row for each record of a suite that has samples.

    Columns: the entries of its case; `peer`; `record`; `key`, which those of one case share; and as Estimates, or None,
    `value` [s or B]; `ratio`, to the base: the case's first peer, which a user has today; `faster`, how many times
    faster than torch.where.
    """
    cases: dict[tuple, dict[str, Record]] = {}
    for record in records:
        if record.suite == suite:
            cases.setdefault(tuple(record.case.items()), {})[record.peer] = record
    rows = []
    for key, peers in cases.items():
        base = next(iter(peers.values()))
        for peer, record in peers.items():
            if record.samples:
                value, ratio = Estimate.of(passes(record.samples)), None if record is base else over(record, base)
                row = {"peer": peer, "record": record, "key": key, "value": value, "ratio": ratio}
                rows.append({**record.case, **row, "faster": over(peers.get("where"), record)})
    return table(rows, [*ENTRIES, *COLUMNS]).astype(dict.fromkeys(("value", "ratio", "faster"), object))


def table(rows: Sequence[Mapping], columns: Sequence[str]) -> pd.DataFrame:
    """Rows as a table, which has these columns without any row too."""
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=list(columns), dtype=object)


def over(record: Record | None, other: Record | None) -> Estimate | None:
    """The ratio to another peer of the same case, from samples taken side by side; None if there are none."""
    if record is None or other is None or not record.samples or len(other.samples) != len(record.samples):
        return None
    if record.unit == "B" and not other.samples[0][0]:
        return None
    return Estimate.of(ratios(record.samples, other.samples))


def ours(peers: Iterable[str]) -> list[str]:
    """Those of the peers that are ours."""
    return [peer for peer in peers if peer.startswith(("partkernels", "partnets"))]


def unforced(peers: Iterable[str]) -> list[str]:
    """Those of ours that compute by the plan that they choose, as "partkernels triton": what a user gets."""
    return [peer for peer in ours(peers) if len(peer.partition(",")[0].split()) < 3]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown. pandas has one only with a package more.

    Example:
        >>> print(markdown(["a", "b"], [["1", "2"]]))
        | a | b |
        | --- | --- |
        | 1 | 2 |
    """
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))
