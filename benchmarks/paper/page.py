"""page: the tables of committed results inside the documentation, where a comment names the result."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import readme
from benchmarks.paper.report import Report
from benchmarks.results import Results

RESULTS = Path("benchmarks/results/paper")
PAGE = Path("docs/paper.md")
BLOCK = re.compile(r"(<!-- (result|costs): (\S+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)


def filled(text: str, results: Path) -> str:
    """The text with each block between its two comments made anew; edits inside are lost.

    Args:
        results: the folder of the experiments' results; those of the benchmark suites are beside it.

    Raises:
        ValueError: the text has no such block.
    """
    if not BLOCK.search(text):
        raise ValueError("there is no block of results; write <!-- result: NAME --> and <!-- end of result -->.")

    def made(match: re.Match) -> str:
        begin, kind, name, end = match.groups()
        if kind == "costs":
            return f"{begin}{readme.steps(Results.load(results.parent / f'{name}.json'))}\n{end}"
        return f"{begin}{Report.load(results / f'{name}.json').text()}\n{end}"

    return BLOCK.sub(made, text)


def write(page: Path, results: Path) -> None:
    """Makes the blocks of a page anew."""
    page.write_text(filled(page.read_text(), results))
