"""The circumstances of a run: machine, software, number of passes, and the meaning of its intervals."""

from __future__ import annotations

from partbench.measuring.estimates import Estimate
from partbench.report import text
from partbench.results import Results


def facts(results: Results) -> dict[str, dict[str, str]]:
    """Return names and values by heading."""
    commit = results.commit + (", with modified files" if results.modified else "")
    given = {"Machine": results.machine, "Versions": results.versions, "Settings": results.settings}
    known = {heading: {n: str(v) for n, v in values.items() if v != ""} for heading, values in given.items()}
    rooflines = {name: text.rate(name, value) for name, value in results.rooflines.items()}
    return {
        "Run": {"command": results.command, "commit": commit, "date": results.date},
        **known,
        "Rooflines": rooflines,
    }


def intervals(results: Results) -> list[str]:
    """Return a sentence on the interval for each number of passes that occurs."""
    counts = {len(r.samples) for r in results.records if r.unit == "s" and r.samples}
    return [_interval(count) for count in sorted(counts, reverse=True)]


def _interval(count: int) -> str:
    if count == 1:
        return "With 1 pass there is no interval."
    estimate = Estimate.of(range(count))
    cut, confidence = int(estimate.low), text.percent(estimate.confidence)
    which = "from the least to the greatest" if not cut else f"from number {cut + 1} to number {count - cut} in order"
    return f"With {count} passes it runs {which}, which holds the true median with {confidence} confidence."


def peers(results: Results) -> dict[str, str]:
    """Return the compared peers with their descriptions."""
    found = {}
    for record in results.records:
        # Without the updated quantity, as in 'paper, parameters'.
        name = record.peer.removesuffix(", parameters").removesuffix(", hyperparameters")
        if name.startswith("partkernels "):
            _, backend, *plan = name.split()
            found[name] = f"ours, on the backend {backend}" + "".join(f", always by the plan {each}" for each in plan)
        elif name in text.ABOUT_PEERS:
            found[name] = text.ABOUT_PEERS[name]
    return found
