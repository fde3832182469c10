"""Report: an experiment's records with the command that made them, its table and its claims."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.paper.experiment import Record, markdown
from benchmarks.paper.experiments import EXPERIMENTS


@dataclass(frozen=True)
class Report:
    """What is kept of an experiment.

    Attributes:
        experiment: its name.
        dataset: that it ran on.
        command: that repeats it.
        records: a setting and the result of its training in one dict, for each.
    """

    experiment: str
    dataset: str
    command: str
    records: Sequence[Record]

    def save(self, path: Path) -> None:
        """Writes JSON, a line for each record."""
        head = {**asdict(self), "torch": torch.__version__}
        records = ",\n".join(json.dumps(record) for record in head.pop("records"))
        path.write_text(json.dumps(head)[:-1] + f', "records": [\n{records}\n]}}\n')

    @classmethod
    def load(cls, path: Path) -> Report:
        contents = json.loads(path.read_text())
        return cls(contents["experiment"], contents["dataset"], contents["command"], contents["records"])

    def text(self) -> str:
        """The command, the table, and each claim with what was found, in Markdown."""
        experiment = EXPERIMENTS[self.experiment]
        claims = sorted(experiment.claims(self.records), key=lambda claim: claim.holds)
        held = sum(claim.holds for claim in claims)
        rows = [[claim.text, claim.found, "yes" if claim.holds else "**no**"] for claim in claims]
        hours = sum(record["seconds"] for record in self.records) / 3600
        return "\n\n".join(
            [
                f"`{self.command}`: {len(self.records)} trainings, {hours:.2f} hours of one thread",
                experiment.table(self.records),
                f"{held} of {len(claims)} claims hold:",
                markdown(["claim", "found", "holds"], rows),
            ]
        )
