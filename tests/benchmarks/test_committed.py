"""Tests of committed results: files are readable, and the pages' tables are made from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from partbench import bars, figures
from partbench.report import readme
from partbench.results import Results

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def test_there_are_results():
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_committed_results_are_of_a_commit_and_none_of_ours_was_refused(path):
    results = Results.load(path)
    ours = [record for record in results.records if figures.ours([record.peer])]
    # A forced plan does not support every product; a backend that chooses its plan does.
    asked = [record for record in ours if figures.unforced([record.peer])]
    assert asked and all(record.samples for record in asked)
    assert not [record.label for record in ours if record.refused or record.missing.startswith("failed")]
    assert not results.modified, "measure a commit"


@pytest.mark.parametrize("page", ["docs/benchmarks.md", "benchmarks/results/nested.md"])
def test_the_pages_tables_are_those_of_the_committed_results(page):
    text = (ROOT / page).read_text()
    command = next(line for line in text.splitlines() if line.startswith("python -m partbench") and "--readme" in line)
    files = [word for word in command.split() if word.endswith(".json")]
    assert files
    made = readme.tables([Results.load(ROOT / file) for file in files])
    assert made in text, f"run {command}"


@pytest.mark.full
def test_the_table_of_the_cpus_kernels_is_that_of_the_committed_results():
    text = (ROOT / "benchmarks" / "results" / "cpu-kernels.md").read_text()
    command = next(line for line in text.splitlines() if line.startswith("python -m partbench bars"))
    made = bars.table([Results.load(ROOT / word) for word in command.split() if word.endswith(".json")])
    assert made in text, f"run {command}"
