"""Tests of results: files are read as they were written, and other files are rejected."""

from __future__ import annotations

import pytest
from simulated import results, workload

from partbench.results import Results, merged


def test_a_file_holds_every_sample(tmp_path):
    before = results(workload(a=1e-3, b=2.0))
    before.save(tmp_path / "deep" / "results.json")
    after = Results.load(tmp_path / "deep" / "results.json")
    assert [record.key for record in after.records] == [record.key for record in before.records]
    for mine, theirs in zip(after.records, before.records, strict=True):
        assert mine.samples == [pytest.approx(rounds, rel=1e-4) for rounds in theirs.samples]
    assert after.machine == before.machine and after.command == before.command


def test_writing_leaves_no_half_file(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    results(workload(a=1.0)).save(path)
    text = path.read_text()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        results(workload(b=1.0)).save(path)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not hold results of this suite"),
        ("[1]", "does not hold results of this suite"),
        ("{}", "has format None and this version reads 1; measure again"),
        ('{"format": 2, "records": []}', "has format 2"),
        ('{"format": 1}', "does not hold results"),
        ('{"format": 1, "records": [{"suit": "speed"}]}', "pass a file that `python -m partbench` wrote"),
    ],
)
def test_files_of_other_formats_raise(text, message, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Results.load(path)


def test_suites_measured_one_by_one_become_one_run_and_repetitions_stay_apart():
    speed, optim = results(workload(a=1.0)), results(workload("optim", a=2.0))
    optim.command = "python -m partbench optim"
    (both,) = merged([speed, optim])
    assert [record.suite for record in both.records] == ["speed", "optim"]
    assert both.command == "python -m partbench speed; python -m partbench optim"
    assert len(speed.records) == 1, "what was given stays as it is"
    assert len(merged([speed, optim, results(workload(a=3.0))])) == 2
    optim.commit = "another"
    assert merged([speed, optim]) == [speed, optim]
