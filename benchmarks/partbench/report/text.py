"""Text: numbers with three significant digits, their intervals, and names for readers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from partbench.measuring.estimates import Estimate
from partbench.results import Record, Results

Case = Mapping[str, str | int | float]

SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
BYTES = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}
RATES = {"T": 1e12, "G": 1e9, "M": 1e6}
ABOUT_PEERS = {
    "dense": "PyTorch's own layer, without partitions: what ours replaces",
    "where": "torch.where on a byte a weight and a stored second copy of the weights, in eager mode",
    "where, compiled": "the same under torch.compile",
    "parametrize": "torch.nn.utils.parametrize with a boolean mask for one subnetwork",
    "paper": "as in the paper's Appendix D.2: a byte a weight, stored defaults, a masked weight at every step",
    "floor": "the fewest bytes that any assignment with these proportions takes: its entropy",
    "torch, fused": "torch.optim over all weights, fused=True",
    "torch, foreach": "torch.optim over all weights, foreach=True",
    "partnets": "partnets.optim over the weights of one partition",
}


def significant(value: float) -> str:
    """Format three significant digits without an exponent.

    Example:
        >>> significant(0.01234), significant(12.0), significant(1234.5)
        ('0.0123', '12.0', '1234')
    """
    if not value or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def ratio(value: float) -> str:
    """Format a ratio: two decimals from 0.1 to 10, otherwise two or three significant digits.

    Example:
        >>> ratio(0.951), ratio(12.34), ratio(0.0123)
        ('0.95×', '12.3×', '0.012×')
    """
    if math.isnan(value):
        return "–"
    return (f"{value:.2g}" if value < 0.1 else f"{value:.2f}" if value < 10 else significant(value)) + "×"


def scaled(value: float, units: Mapping[str, float]) -> str:
    """Format a value in the largest unit that leaves at least 1.

    Example:
        >>> scaled(0.00123, SECONDS)
        '1.23 ms'
    """
    unit = _unit(value, units)
    return f"{significant(value / units[unit])} {unit}"


def _unit(value: float, units: Mapping[str, float]) -> str:
    # A value that rounds to 1000 of a unit is shown as 1.00 of the next.
    return next((unit for unit, size in units.items() if abs(value) >= 0.9995 * size), list(units)[-1])


def percent(share: float) -> str:
    """Format a share with at least two digits.

    Example:
        >>> percent(0.9688), percent(0.04), percent(0.0012)
        ('97 %', '4.0 %', '0.1 %')
    """
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


def span(low: float, high: float) -> str:
    """Format a range of ratios.

    Example:
        >>> span(0.9, 1.123)
        '0.90–1.12'
    """
    return f"{ratio(low)}–{ratio(high)}".replace("×", "")


def ratios(estimate: Estimate | None) -> tuple[str, str]:
    """Format a ratio and its interval."""
    if estimate is None:
        return "–", ""
    return ratio(estimate.value), span(estimate.low, estimate.high) if estimate.confidence else ""


def quantities(estimate: Estimate | None, unit: str) -> tuple[str, str]:
    """Format seconds or bytes, and their interval in the same unit."""
    if estimate is None:
        return "–", ""
    units = BYTES if unit == "B" else SECONDS
    size = units[_unit(estimate.value, units)]
    interval = f"{significant(estimate.low / size)}–{significant(estimate.high / size)}"
    return scaled(estimate.value, units), interval if estimate.confidence else ""


def rate(name: str, value: float) -> str:
    """Format a roofline: bytes or floating-point operations a second."""
    return scaled(value, RATES) + ("B/s" if name == "copy" else "FLOP/s")


def phrases(case: Case, names: Iterable[str] | None = None) -> str:
    """Describe a case, or only the named entries, in words.

    Example:
        >>> phrases({"work": "forward", "dtype": "float32", "bits": 2})
        'forward, float32, bits 2'
    """
    alone = ("operator", "work", "shape", "dtype", "device", "model", "optimizer", "figure")
    found = ((name, case[name]) for name in (case if names is None else names) if case.get(name, "") != "")
    return ", ".join(str(value) if name in alone else f"{name} {value}" for name, value in found)


def varying(cases: Sequence[Case]) -> list[str]:
    """Return the names of entries that differ between cases."""
    names = dict.fromkeys(name for case in cases for name in case)
    return [name for name in names if len({case.get(name) for case in cases}) > 1]


def constant(cases: Sequence[Case], *, but: Iterable[str] = ()) -> str:
    """Describe the entries that all cases have in common."""
    return phrases(cases[0], [name for name in cases[0] if name not in {*varying(cases), *but}]) if cases else ""


def why(record: Record) -> str:
    """Return why a record has no figure."""
    return f"refused: {record.refused}" if record.refused else record.missing or "not measured"


def commit(results: Results) -> str:
    return results.commit[:9] + (", modified" if results.modified else "")
