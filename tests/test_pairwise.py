"""pairwise leaves out no meeting of two values, and nothing at all where everything is asked for."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from pairwise import pairwise

SIZES = {"a": range(3), "b": range(4), "c": range(5), "d": (False, True)}


def rows_of(mark) -> list[tuple]:
    return [case.values for case in mark.args[1]]


def meetings(rows) -> set:
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setenv("FULL", "")


@pytest.mark.parametrize("where", [None, lambda a, b, c, d: a != b and (d or c < 4)])
def test_every_two_values_meet_that_may_in_few_rows(where, short):
    feasible = [row for row in product(*SIZES.values()) if where is None or where(*row)]
    rows = rows_of(pairwise(where, **SIZES))
    assert set(rows) <= set(feasible) and len(set(rows)) == len(rows)
    assert meetings(rows) == meetings(feasible)
    assert len(rows) <= 1.5 * 4 * 5  # what the two longest dimensions alone take


def test_of_strength_1_each_value_is_in_a_row(short):
    rows = rows_of(pairwise(strength=1, **SIZES))
    assert len(rows) == 5 and [set(values) for values in zip(*rows, strict=True)] == [set(v) for v in SIZES.values()]


@pytest.mark.parametrize("full", ["1", "yes"])
def test_full_is_every_combination(full, monkeypatch):
    monkeypatch.setenv("FULL", full)
    assert rows_of(pairwise(**SIZES)) == list(product(*SIZES.values()))


def test_the_same_rows_each_time_as_workers_must_agree(short):
    first, second = (pairwise(**SIZES) for _ in range(2))
    assert rows_of(first) == rows_of(second) and [case.id for case in first.args[1]] == [
        case.id for case in second.args[1]
    ]


def test_equal_values_that_are_different_objects_are_not_mixed_up(short):
    rows = rows_of(pairwise(first=(0, False), second=(1, True, 1.0)))
    assert [(type(a), type(b)) for a, b in rows] == list(product((int, bool), (int, bool, float)))


def test_one_dimension_and_none_that_are_feasible(short):
    assert rows_of(pairwise(only="abc")) == [("a",), ("b",), ("c",)]
    assert rows_of(pairwise(lambda a: False, a="abc")) == []


def test_the_keys_of_a_mapping_name_the_tests(short):
    mark = pairwise(case={"small": [1], "large": [9]}, sign="+-")
    assert mark.args[0] == ("case", "sign")
    assert [case.id for case in mark.args[1]] == ["small-+", "small--", "large-+", "large--"]
