"""`pairwise` has every value in a usual run, every two values together in FULL, and all combinations in weekly runs."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from pairwise import pairwise
from tiers import Tier

SIZES = {"a": range(3), "b": range(4), "c": range(5), "d": (False, True)}


def rows_of(mark) -> list[tuple]:
    return [case.values for case in mark.args[1]]


def meetings(rows) -> set:
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


@pytest.fixture(params=["USUAL", "FULL", "WEEKLY"])
def any_tier(request, monkeypatch):
    return ask_for(request.param, monkeypatch)


@pytest.fixture
def full(monkeypatch):
    ask_for("FULL", monkeypatch)


def ask_for(name, monkeypatch):
    for each in ("FULL", "WEEKLY"):
        monkeypatch.setenv(each, "1" if each == name else "")
    return Tier[name]


def run_in_usual(mark) -> list[tuple]:
    return [case.values for case in mark.args[1] if not case.marks]


def run_in_full(mark) -> list[tuple]:
    """Return the rows that run before the weekly run."""
    return [case.values for case in mark.args[1] if not any(one.name == "weekly" for one in case.marks)]


@pytest.mark.parametrize("where", [None, lambda a, b, c, d: a != b and (d or c < 4)])
def test_every_two_values_meet_that_may_in_few_rows(where, full):
    feasible = [row for row in product(*SIZES.values()) if where is None or where(*row)]
    rows = run_in_full(pairwise(where, **SIZES))
    assert set(rows) <= set(feasible) and len(set(rows)) == len(rows)
    assert meetings(rows) == meetings(feasible)
    assert len(rows) <= 1.5 * 4 * 5  # 4 * 5: the number of pairs of the two longest dimensions


def test_the_other_rows_of_a_full_run_are_weekly_tests(full):
    mark = pairwise(**SIZES)
    assert rows_of(mark) == list(product(*SIZES.values())) and len(run_in_full(mark)) < len(rows_of(mark))
    assert {one.name for case in mark.args[1] for one in case.marks} == {"full", "weekly"}


def test_of_strength_1_and_in_a_usual_run_each_value_is_in_a_row(monkeypatch):
    ask_for("FULL", monkeypatch)
    of_strength_1 = run_in_full(pairwise(strength=1, **SIZES))
    ask_for("USUAL", monkeypatch)
    for rows in (of_strength_1, run_in_usual(pairwise(**SIZES))):
        assert len(rows) == 5 and [set(values) for values in zip(*rows, strict=True)] == [
            set(v) for v in SIZES.values()
        ]


def test_the_usual_run_is_a_part_of_full(monkeypatch):
    ask_for("FULL", monkeypatch)
    full = run_in_full(pairwise(**SIZES))
    ask_for("USUAL", monkeypatch)
    assert set(run_in_usual(pairwise(**SIZES))) < set(full) == set(rows_of(pairwise(**SIZES)))


def test_a_weekly_run_has_every_combination(monkeypatch):
    ask_for("WEEKLY", monkeypatch)
    assert rows_of(pairwise(**SIZES)) == list(product(*SIZES.values()))


def test_the_same_rows_each_time_as_workers_must_agree(any_tier):
    first, second = (pairwise(**SIZES) for _ in range(2))
    assert [(case.values, case.id) for case in first.args[1]] == [(case.values, case.id) for case in second.args[1]]


def test_equal_values_that_are_different_objects_are_not_mixed_up(full):
    rows = run_in_full(pairwise(first=(0, False), second=(1, True, 1.0)))
    assert [(type(a), type(b)) for a, b in rows] == list(product((int, bool), (int, bool, float)))


def test_one_dimension_and_none_that_are_feasible(any_tier):
    assert rows_of(pairwise(only="abc")) == [("a",), ("b",), ("c",)]
    with pytest.raises(ValueError, match="allows no combination of a, b"):
        pairwise(lambda a, b: False, a="abc", b="de")


def test_a_dimension_without_values_leaves_no_case(any_tier):
    assert rows_of(pairwise(lambda a, b: False, a="abc", b=())) == []


def test_the_keys_of_a_mapping_name_the_tests(full):
    mark = pairwise(case={"small": [1], "large": [9]}, sign="+-")
    assert mark.args[0] == ("case", "sign")
    assert [case.id for case in mark.args[1]] == ["small-+", "small--", "large-+", "large--"]
