"""How a run was made: where, with what, how often, and what its intervals mean."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.estimates import Estimate
from benchmarks.report import text
from benchmarks.results import Results


def facts(results: Results) -> dict[str, dict[str, str]]:
    """Names and values, by heading."""
    return {
        "Run": {
            "command": results.command,
            "commit": results.commit + (", with modified files" if results.modified else ""),
            "date": results.date,
        },
        "Machine": _texts(results.machine),
        "Versions": _texts(results.versions),
        "Settings": _texts(results.settings),
        "Rooflines": {name: text.rate(name, value) for name, value in results.rooflines.items()},
    }


def _texts(values: dict) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if value != ""}


def intervals(results: Results) -> list[str]:
    """A sentence for each number of passes that occurs, on the interval that follows from it."""
    counts = sorted({len(r.samples) for r in results.records if r.unit == "s" and r.samples}, reverse=True)
    return [_interval(count) for count in counts]


def _interval(count: int) -> str:
    if count == 1:
        return "With 1 pass there is no interval."
    estimate = Estimate.of([float(number) for number in range(count)])
    cut = int(estimate.low)
    which = "from the least to the greatest" if not cut else f"from number {cut + 1} to number {count - cut} in order"
    confidence = text.percent(estimate.confidence)
    return f"With {count} passes it runs {which}, which holds the true median with {confidence} confidence."


def peers(results: Results) -> dict[str, str]:
    """Who is compared, and what each is."""
    return dict(_about(dict.fromkeys(_scheme(record.peer) for record in results.records)))


def _scheme(peer: str) -> str:
    """Without what it updates, as in 'paper, parameters'."""
    return peer.removesuffix(", parameters").removesuffix(", hyperparameters")


def _about(names: Iterable[str]) -> Iterable[tuple[str, str]]:
    for name in names:
        if name.startswith("partkernels "):
            _, backend, *plan = name.split()
            yield name, f"ours, on the backend {backend}" + "".join(f", always by the plan {each}" for each in plan)
        elif name in text.ABOUT_PEERS:
            yield name, text.ABOUT_PEERS[name]
