"""Each kind of run has its tests, a FULL run also the slice of the weekly ones that its commit asks for."""

from __future__ import annotations

import re
import zlib
from itertools import product
from types import SimpleNamespace

import pytest
import tiers
from tiers import IN_SLICE, SLICE_SECONDS, SLICES, Tier, covering


@pytest.fixture
def ask_for(monkeypatch):
    def ask(name: str, **more: str) -> None:
        for each in ("FULL", "WEEKLY", "SLICE"):
            monkeypatch.delenv(each, raising=False)
        for each, value in ({name: "1"} | more).items():
            monkeypatch.setenv(each, value)

    return ask


def as_mark(mark: str | pytest.MarkDecorator) -> pytest.MarkDecorator:
    return getattr(pytest.mark, mark) if isinstance(mark, str) else mark


def item(name: str, *marks: str | pytest.MarkDecorator, **parameters: object) -> SimpleNamespace:
    """A collected test, as far as a run looks at it."""
    nodeid = f"tests/test_some.py::{name}" + (f"[{'-'.join(map(str, parameters.values()))}]" if parameters else "")
    found = SimpleNamespace(nodeid=nodeid, originalname=name, stash=pytest.Stash())
    found.get_closest_marker = {mark.name: mark for mark in map(as_mark, marks)}.get
    found.iter_markers = lambda: [as_mark(mark).mark for mark in marks]
    if parameters:
        found.callspec = SimpleNamespace(indices=parameters)
    return found


def collected(items: list, *arguments: str) -> tuple[list[str], list[str]]:
    """Return the names of the tests that run, in their order, and of those that are reported as deselected."""
    left_out, items = [], list(items)
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    where = SimpleNamespace(dir=tiers.ROOT / "tests")
    config = SimpleNamespace(hook=hook, args=arguments, invocation_params=where, rootpath=tiers.ROOT)
    tiers.pytest_collection_modifyitems(config, items)
    return [each.nodeid.partition("::")[2] for each in items], [each.nodeid.partition("::")[2] for each in left_out]


MARKED = [item("quick"), item("slow", "full"), item("slowest", "weekly")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("NEITHER", ["quick"]), ("FULL", ["quick", "slow"]), ("WEEKLY", ["quick", "slow", "slowest"])],
)
def test_marks_say_in_which_runs_a_test_is(name, expected, ask_for):
    number = next(n for n in range(SLICES) if n != zlib.crc32(MARKED[2].nodeid.encode()) % SLICES)
    ask_for(name, SLICE=str(number))
    ran, left_out = collected(MARKED)
    assert ran == expected and {*ran, *left_out} == {"quick", "slow", "slowest"}


@pytest.mark.parametrize(("name", "count"), [("NEITHER", 3), ("FULL", 9), ("WEEKLY", 18)])
def test_products_of_parameters_are_thinned(name, count, ask_for, monkeypatch):
    ask_for(name)
    monkeypatch.setattr(tiers, "slice_number", lambda: None)
    ran, _ = collected([item("product", a=a, b=b, c=c) for a, b, c in product("xyz", "123", "+-")])
    assert len(ran) == count
    assert all(any(value in each for each in ran) for value in "xyz123+-")


@pytest.mark.parametrize(("usual", "expected"), [(0, []), (1, [0]), (3, [0, 3, 6]), (20, [*range(10)])])
def test_a_run_has_as_many_cases_as_the_mark_says(usual, expected, ask_for):
    cases = [item("some", pytest.mark.cases(usual=usual), case=n) for n in range(10)]
    ask_for("NEITHER")
    assert collected(cases)[0] == [f"some[{n}]" for n in expected]
    ask_for("FULL")
    assert len(collected(cases)[0]) == 10


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("test_some.py::slow", ["quick", "slow[0]", "slow[1]"]),
        ("./test_some.py::slow[1]", ["quick", "slow[1]"]),
        ("test_some.py", ["quick"]),
        ("test_other.py::slow", ["quick"]),
    ],
)
def test_tests_that_the_command_line_names_run_in_every_run(argument, expected, ask_for):
    ask_for("NEITHER")
    cases = [item("slow", "weekly", case=n) for n in range(2)]
    assert collected([item("quick"), *cases, item("slower", "full")], argument)[0] == expected


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        (pytest.mark.cases(usal=3), "cases{'usal': 3}, but this mark takes full and usual"),
        (pytest.mark.full(usual=3), "full{'usual': 3}, but this mark takes no arguments"),
        (pytest.mark.weekly(False), "weekly(False,), but this mark takes in_slices"),
    ],
)
@pytest.mark.parametrize("name", ["NEITHER", "FULL", "WEEKLY"])
def test_a_mark_with_arguments_that_it_has_not_raises(mark, message, name, ask_for):
    ask_for(name, SLICE="0")
    with pytest.raises(pytest.UsageError, match=re.escape(message)):
        collected([item("some", mark)])


def test_a_slice_is_a_number(ask_for):
    ask_for("FULL", SLICE="last")
    with pytest.raises(pytest.UsageError, match="SLICE='last', but slices have numbers; pass one from 0 to 23"):
        tiers.slice_number()


def test_cases_of_several_arguments_are_not_thinned(ask_for):
    ask_for("NEITHER")
    cases = [item("some", a=n, b=n) for n in range(5)]  # of one parametrize: both arguments have its index
    assert len(collected(cases)[0]) == 5
    assert len(collected([item("some", a=n, b=n, c=c) for n in range(5) for c in "xy"])[0]) == 5


def test_lists_of_cases_and_other_functions_are_not_thinned(ask_for):
    ask_for("NEITHER")
    one = [item("cases", case=n) for n in range(20)]
    other = [item("others", a=1, b=2), item("plain"), item("others", a=1)]
    assert collected(one + other) == ([each.nodeid.partition("::")[2] for each in one + other], [])


def test_all_slices_together_have_each_weekly_test_once_behind_the_others(ask_for):
    items, seen = [item(f"weekly{n}", "weekly") for n in range(200)] + [item("quick")], []
    items.append(item("an hour", pytest.mark.weekly(in_slices=False)))
    for number in range(SLICES):
        ask_for("FULL", SLICE=str(number + 3 * SLICES))
        ran, _ = collected(items)
        assert ran[0] == "quick"
        seen += ran[1:]
    assert sorted(seen) == sorted(f"weekly{n}" for n in range(200))


def test_the_commit_chooses_the_slice(ask_for, monkeypatch, tmp_path):
    ask_for("FULL")
    answer = SimpleNamespace(stdout="0000001b" + 32 * "0" + "\n", returncode=0)
    monkeypatch.setattr(tiers.subprocess, "run", lambda *_, **__: answer)
    assert tiers.slice_number() == 27 % SLICES
    assert tiers.pytest_report_header() == f"run: full, with slice {27 % SLICES} of {SLICES} of the weekly tests"
    answer.returncode, answer.stdout = 128, ""
    assert tiers.slice_number() is None and tiers.pytest_report_header() == "run: full"


def test_a_slice_ends_when_its_time_is_over_and_says_how_a_failure_runs_again(monkeypatch):
    one, other = item("of the slice", "weekly"), item("usual")
    one.stash[IN_SLICE] = True
    monkeypatch.setattr(tiers, "_spent", SLICE_SECONDS + 1.0)
    tiers.pytest_runtest_setup(other)
    with pytest.raises(pytest.skip.Exception, match=f"the {SLICE_SECONDS} seconds"):
        tiers.pytest_runtest_setup(one)
    for each, count in ((one, 1), (other, 0)):
        report = tiers.pytest_runtest_makereport(each)
        next(report)
        with pytest.raises(StopIteration) as done:
            report.send(SimpleNamespace(failed=True, sections=[]))
        assert len(done.value.value.sections) == count
        again = "WEEKLY=1 python -m pytest 'tests/test_some.py::of the slice'"
        assert all(again in text for _, text in done.value.value.sections)


def test_coverings_of_each_strength():
    rows = list(product(range(3), "abcd", (0, False)))
    assert Tier.USUAL == 1 and len(covering(rows, Tier.USUAL)) == 4
    assert 12 <= len(covering(rows, Tier.FULL)) < 16 and len(covering(rows, 3)) == len(rows)
    assert covering([]) == [] and covering(rows) == covering(rows)
