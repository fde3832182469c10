"""Figures: a table of estimates from records, with ratios to each case's base peer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from partbench.measuring.estimates import Estimate, passes, ratios
from partbench.results import Record

COLUMNS = ("peer", "record", "key", "value", "ratio", "faster")
# Columns of cases, in any suite.
ENTRIES = ("operator", "work", "shape", "dtype", "device", "proportions", "bits", "defaults", "active")
ENTRIES += ("model", "batch", "optimizer", "update", "figure")


def figures(records: Iterable[Record], suite: str) -> pd.DataFrame:
    """Return a row for each record of a suite that has samples.

    Columns: the entries of its case; `peer`; `record`; `key`, shared by the records of a case; and as Estimates, or
    None, `value` [s or B]; `ratio` to the base, the case's first peer, which users have today; `faster`, the speed-up
    over torch.where.
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
    """Return rows as a table that has these columns even without rows."""
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=list(columns), dtype=object)


def over(record: Record | None, other: Record | None) -> Estimate | None:
    """Return the ratio to another peer of the same case, from samples taken side by side; None without such samples."""
    if record is None or other is None or not record.samples or len(other.samples) != len(record.samples):
        return None
    if record.unit == "B" and not other.samples[0][0]:
        return None
    return Estimate.of(ratios(record.samples, other.samples))


def ours(peers: Iterable[str]) -> list[str]:
    """Return the peers that are ours."""
    return [peer for peer in peers if peer.startswith(("partkernels", "partnets"))]


def unforced(peers: Iterable[str]) -> list[str]:
    """Return our peers that choose their plan themselves, such as "partkernels triton", as they do for users."""
    return [peer for peer in ours(peers) if len(peer.partition(",")[0].split()) < 3]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table in Markdown, for which pandas would need another package.

    Example:
        >>> print(markdown(["a", "b"], [["1", "2"]]))
        | a | b |
        | --- | --- |
        | 1 | 2 |
    """
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))
