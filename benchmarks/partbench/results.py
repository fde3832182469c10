"""Results: the figures of one run of the suite with its circumstances, as a JSON file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

FORMAT = 1


@dataclass
class Record:
    """One peer's figures in one case.

    Attributes:
        suite: speed, memory, step or optim.
        case: names and values that, with suite and peer, identify a record in a file.
        peer: the measured implementation.
        unit: of the samples: "s" for seconds a call, "B" for bytes.
        samples: a list for each pass. Within a pass, the i-th samples of a case's peers were taken side by side.
        refused: why there is no figure although the peer ran: its result differs from the reference's.
        missing: why there is no figure: the peer does not run here.
        facts: further figures without samples, such as floating-point operations a call.
    """

    suite: str
    case: dict[str, str | int | float]
    peer: str
    unit: str = "s"
    samples: list[list[float]] = field(default_factory=list)
    refused: str = ""
    missing: str = ""
    facts: dict[str, float | str] = field(default_factory=dict)

    @property
    def key(self) -> tuple:
        """Return a key that is equal for the same figure in two files."""
        return self.suite, *self.case.items(), self.peer

    @property
    def label(self) -> str:
        """Return the key as one line of text."""
        return f"{' '.join(map(str, (self.suite, *self.case.values())))}, {self.peer}"

    @property
    def problem(self) -> str:
        """Return the kind of problem, "refused", "failed" or "missing"; an empty string if there is a figure."""
        if self.refused or self.missing.startswith("failed"):
            return "refused" if self.refused else "failed"
        return "" if self.samples else "missing"


@dataclass
class Results:
    """One run of the suite.

    Attributes:
        command: the command line.
        commit, modified: of the library; modified if its files differed from the commit.
        date: of the start, UTC, ISO 8601.
        machine, versions, settings: names and values.
        rooflines: peak rates of this machine: copy [B/s], matmul float32 [FLOP/s], ...
        records: in the order of measurement.
    """

    command: str
    commit: str
    modified: bool
    date: str
    machine: dict[str, str | int | float]
    versions: dict[str, str]
    settings: dict[str, str | int | float]
    rooflines: dict[str, float] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    format: int = FORMAT

    @property
    def device(self) -> str:
        """Return the hardware that did the work."""
        return str(self.machine.get("gpu") or self.machine["processor"])

    @property
    def version(self) -> str:
        """Return the commit, followed by '+' if files differed from it."""
        return self.commit[:9] + "+" * self.modified

    def save(self, path: str | os.PathLike) -> None:
        """Write the file atomically."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        head = dataclasses.asdict(dataclasses.replace(self, records=[]))
        del head["records"]
        # A line for each record, so that a difference between two files is readable.
        lines = ",\n".join(json.dumps(_without_defaults(record)) for record in self.records)
        text = json.dumps(head, indent=1).removesuffix("\n}") + ',\n "records": [\n' + lines + "\n]}\n"
        temporary = path.with_name(path.name + ".partial")
        temporary.write_text(text)
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Results:
        """Read a file that `save` wrote.

        Raises:
            ValueError: the file has other contents or another format.
        """
        try:
            content = json.loads(Path(path).read_text())
            found = content.get("format")
            if found == FORMAT:
                content["records"] = [Record(**record) for record in content["records"]]
                return cls(**content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} does not hold results of this suite ({error}); pass a file that `python -m partbench` wrote."
            ) from error
        raise ValueError(f"{path} has format {found!r} and this version reads {FORMAT}; measure again.")


def merged(files: Iterable[Results]) -> list[Results]:
    """Merge runs of different suites that have the same library, machine and settings.

    Files that have a figure in common stay apart, so that they can be compared.
    """
    runs: list[Results] = []
    for file in files:
        for index, run in enumerate(runs):
            keys = {record.key for record in run.records}
            same = ("commit", "modified", "machine", "versions", "settings")
            is_same = all(getattr(run, name) == getattr(file, name) for name in same)
            if is_same and keys.isdisjoint(record.key for record in file.records):
                command = run.command if file.command == run.command else f"{run.command}; {file.command}"
                both = {"rooflines": file.rooflines | run.rooflines, "records": run.records + file.records}
                runs[index] = dataclasses.replace(run, command=command, **both)
                break
        else:
            runs.append(file)
    return runs


def _without_defaults(record: Record) -> dict:
    fields = dataclasses.asdict(record)
    fields["samples"] = [[float(f"{sample:.5g}") for sample in rounds] for rounds in record.samples]
    return {name: value for name, value in fields.items() if name in ("suite", "case", "peer", "unit") or value}
