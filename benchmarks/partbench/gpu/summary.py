"""summary: one page with the steps, the first errors and the results."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from partbench.gpu.steps import Outcome, Step

# Maximum lines of the page, of the output shown for a step, and of the ratios.
LINES, SHOWN, RATIOS = 100, 36, 18
# Maximum lines of all errors, and characters of a line.
ERRORS, WIDTH = 18, 160
# The last matching line is the step's result.
_CAME_TO = re.compile(r"\d+ (passed|failed)|\d+ figures|\d+ of \d+ ")
# Lines that report an error of an exception, a compiler, a test or a sanitizer.
_WRONG = re.compile(r"\b(error|Error|Exception|FAILED|cannot|Killed|fault|hazard|died|hangs)\b|Error:")


def write(path: Path, steps: Sequence[Step], outcomes: Sequence[Outcome], results: Sequence[Path]) -> None:
    """Write the page atomically."""
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text("\n".join(page(steps, outcomes, results)) + "\n")
    os.replace(temporary, path)


def page(steps: Sequence[Step], outcomes: Sequence[Outcome], results: Sequence[Path]) -> list[str]:
    """Return the lines of the page.

    Args:
        steps: all planned steps.
        outcomes: of the steps so far; the last one may be running.
        results: the suites' files, which may not exist yet.
    """
    ok, seconds = sum(o.state == "ok" for o in outcomes), sum(o.seconds for o in outcomes)
    lines = [f"# make gpu: {ok} of {len(steps)} steps are ok, {seconds:.0f} s", ""]
    lines += ["| step | seconds | at most | state |", "| --- | --- | --- | --- |"]
    lines += [f"| {o.step.name} | {o.seconds:.0f} | {o.step.seconds:.0f} | {_state(o)} |" for o in outcomes]
    if left := [step.name for step in steps[len(outcomes) :]]:
        lines += ["", f"Not run yet: {', '.join(left)}."]
    lines += _errors([outcome for outcome in outcomes if outcome.state not in ("ok", "running")])
    ratios = _ratios([path for path in results if path.exists()])
    for outcome in outcomes:
        if outcome.step.shown:
            lines += _shown(outcome, min(SHOWN, LINES - len(ratios) - len(lines) - 3))
    return (lines + ratios)[:LINES]


def _state(outcome: Outcome) -> str:
    state = outcome.state if outcome.state in ("ok", "running") else f"**{outcome.state}**"
    came_to = [line.strip("= ")[:70] for line in _lines(outcome) if _CAME_TO.search(line)]
    return f"{state}: {came_to[-1]}" if came_to else state


def _lines(outcome: Outcome) -> list[str]:
    return [line[:WIDTH].rstrip() for line in outcome.output.splitlines()]


def _errors(failed: Sequence[Outcome]) -> list[str]:
    """Return each failed step's first lines that report an error, or its last lines if none does."""
    lines = []
    for outcome in failed:
        said = [line.strip() for line in _lines(outcome) if line and not line.startswith("== ")]
        each = max(1, ERRORS // len(failed))
        found = [line for line in said if _WRONG.search(line)][:each] or said[-each:]
        lines += [f"    {outcome.step.name}: {line}"[:WIDTH] for line in found]
    return ["", "What failed said first:", "", *lines] if lines else []


def _shown(outcome: Outcome, most: int) -> list[str]:
    lines = [line for line in _lines(outcome) if line.startswith(outcome.step.shown)]
    if not lines or most < 1:
        return []
    if len(lines) > most:
        lines = [*lines[: most - 1], f"... {len(lines) - most + 1} more lines are in the log"]
    return ["", f"{outcome.step.name}:", "", *lines]


def _ratios(files: Sequence[Path]) -> list[str]:
    """Return a Markdown table of times over the dense layer's, for the slowest active subnetwork."""
    try:  # pandas may be missing, and an unexpected file must not end the run
        import pandas as pd

        from partbench.figures import figures, markdown
        from partbench.results import Results

        found = pd.concat([pd.DataFrame(), *(figures(Results.load(path).records, "speed") for path in files)])
        if found.empty or not found.ratio.notna().any():
            return []
        found = found[found.ratio.notna()]
        works = [f"{row.operator} {row.work}, {row.defaults}, {row.shape}" for row in found.itertuples()]
        found = found.assign(work=works, over=[ratio.value for ratio in found.ratio])
        found = found.assign(peer=found.peer.str.removeprefix("partkernels "))
        table = found.pivot_table(index="work", columns="peer", values="over", aggfunc="max", sort=False)
        table = table[sorted(table)].head(RATIOS)
        cells = [[work, *("" if pd.isna(r) else f"{r:.2f}" for r in row)] for work, *row in table.itertuples()]
        head = ["", "Time over the dense layer's, of the slowest active subnetwork:", ""]
        return head + markdown(["work", *table], cells).splitlines()
    except Exception as error:
        return ["", f"No ratios: {type(error).__name__}: {error}"[:WIDTH]]
