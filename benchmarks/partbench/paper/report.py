"""Report: an experiment's records and their command; its table, claims and picture; the documentation's pages."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import torch

from partbench.figures import markdown
from partbench.paper.experiment import EXPERIMENTS, Claim, Record

RESULTS, INDEX = Path("benchmarks/results/paper"), Path("docs/paper.md")
BLOCK = re.compile(r"(<!-- (result|index): (\S+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)
# Dots an inch of pictures: enough for a screen, at a tenth of the file size of vector graphics.
DPI = 110


@dataclass(frozen=True)
class Report:
    """The stored results of an experiment: its name, its data set, the command that repeats it, and its records.

    A record has the setting and the result of a training in one dict.
    """

    experiment: str
    dataset: str
    command: str
    records: Sequence[Record]

    def save(self, path: Path) -> None:
        """Write JSON with a line for each record."""
        head = {**asdict(self), "torch": torch.__version__}
        records = ",\n".join(json.dumps(record) for record in head.pop("records"))
        path.write_text(json.dumps(head)[:-1] + f', "records": [\n{records}\n]}}\n')

    @classmethod
    def load(cls, path: Path) -> Report:
        try:
            contents = json.loads(path.read_text())
            return cls(contents["experiment"], contents["dataset"], contents["command"], contents["records"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a file of results ({error!r}); move it away.") from error

    def draw(self, path: Path) -> None:
        """Save the picture beside the file of results, as PNG with a white background."""
        figure = EXPERIMENTS[self.experiment].draw(pd.DataFrame(self.records))
        figure.savefig(path.with_suffix(".png"), dpi=DPI, facecolor="white", metadata={"Software": None})

    def claims(self) -> list[Claim]:
        """Return the experiment's claims, those that fail first."""
        found = EXPERIMENTS[self.experiment].claims(pd.DataFrame(self.records))
        return sorted(found, key=lambda claim: claim.holds)

    def text(self) -> str:
        """Return the command, the table, and each claim with its evidence, in Markdown."""
        experiment, frame, claims = EXPERIMENTS[self.experiment], pd.DataFrame(self.records), self.claims()
        rows = [[claim.text, claim.found, "yes" if claim.holds else "**no**"] for claim in claims]
        parts = [
            f"`{self.command}`: {len(frame)} trainings, {frame.seconds.sum() / 3600:.2f} hours of one thread",
            markdown(*experiment.table(frame)),
            f"{sum(claim.holds for claim in claims)} of {len(claims)} claims hold:",
            markdown(["claim", "found", "holds"], rows),
        ]
        return "\n\n".join(parts)


def pages(index: Path = INDEX) -> list[Path]:
    """Return the index and the page of each experiment, which are in the folder of its name."""
    return [index, *sorted(index.with_suffix("").glob("*.md"))]


def _index(results: Path) -> str:
    """Return a row for each experiment: its page, its place in the paper, and how many claims hold on which data."""
    reports, rows = [Report.load(path) for path in sorted(results.glob("*.json"))], []
    for name, experiment in sorted(EXPERIMENTS.items()):
        claims = [(one.dataset, one.claims()) for one in reports if one.experiment == name]
        held = ", ".join(f"{dataset} {sum(each.holds for each in all)} of {len(all)}" for dataset, all in claims)
        rows.append([f"[{name}](paper/{name}.md)", experiment.paper, experiment.__doc__.splitlines()[0], held])
    return markdown(["experiment", "where", "what", "claims that hold"], rows)


def filled(text: str, results: Path) -> str:
    """Return the text with each block between its two comments regenerated; edits inside are lost.

    Args:
        results: the folder of the experiments' results.

    Raises:
        ValueError: the text has no such block.
    """
    if not BLOCK.search(text):
        raise ValueError("the text has no block of results; write <!-- result: NAME --> and <!-- end of result -->.")

    def made(match: re.Match) -> str:
        begin, kind, name, end = match.groups()
        if kind == "index":
            return f"{begin}{_index(results)}\n{end}"
        return f"{begin}{Report.load(results / f'{name}.json').text()}\n{end}"

    return BLOCK.sub(made, text)
