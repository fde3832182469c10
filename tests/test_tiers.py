"""Each kind of run selects its tests, and the usual run's are among those of FULL."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from pairwise import pairwise
from tiers import covering


@pytest.fixture
def collected(pytester, monkeypatch):
    """Return a function that gives the names of the tests that a run collects from a source."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]")  # ignore this project's configuration

    def collect(source: str, *arguments: str, full: bool = False) -> list[str]:
        monkeypatch.setenv("FULL", "1" if full else "")
        pytester.makepyfile(test_some=f"import pytest\nfrom pairwise import pairwise\n\n{source}")
        result = pytester.inline_run("--collect-only", "-p", "tiers", *arguments)
        (finished,) = result.getcalls("pytest_collection_finish")
        return [item.nodeid.partition("::")[2] for item in finished.session.items]

    return collect


MARKED = """
def test_quick(): pass
@pytest.mark.full
def test_slow(): pass
"""
# Dimensions with equal values and with values that are not hashable.
PRODUCT = """
@pytest.fixture(params=[[1], [1]], ids=["first", "second"])
def made(request): return request.param
@pytest.mark.parametrize(("a", "b"), [(0, 1), (False, 1), (0, True)], ids=["int", "bool", "mixed"])
@pytest.mark.parametrize("c", ["x", "y", "z"])
def test_product(a, b, c, made): pass
"""
PAIRS = """
@pairwise(a=range(4), b=range(5))
def test_pairs(a, b): pass
"""
LIST = """
@pytest.mark.parametrize("a, b", [(a, b) for a in "wxyz" for b in (1, 2)])
def test_list(a, b): pass
"""
SOME = """
@pytest.mark.cases(usual=4, full=6)
@pytest.mark.parametrize("n", range(20))
def test_some(n): pass
"""
FEW = """
@pytest.mark.cases(usual=3, full=5)
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(4))
def test_few(a, b): pass
"""
SKIPPED = """
@pytest.mark.parametrize("a", [pytest.param("x", marks=pytest.mark.skipif("True", reason="no")), "y"])
@pytest.mark.parametrize("b", ["1", "2"])
def test_product(a, b): pass
"""


@pytest.mark.parametrize(
    ("source", "usual", "full"),
    [(MARKED, 1, 2), (PRODUCT, 3, 10), (PAIRS, 5, 20), (LIST, 8, 8), (SOME, 4, 6), (FEW, 3, 5), (SKIPPED, 2, 2)],
)
def test_a_run_has_its_part_of_the_tests(source, usual, full, collected):
    few, more = collected(source), collected(source, full=True)
    assert (len(few), len(more)) == (usual, full) and {*few} <= {*more}
    assert collected(source, "test_some.py") == few


def test_tests_that_are_named_always_run(collected):
    assert collected(MARKED, "test_some.py::test_slow") == ["test_slow"]
    assert len(collected(SOME, "test_some.py::test_some")) == 20


def test_a_usual_run_has_every_value_that_is_not_skipped(collected):
    cases = [name.partition("[")[2].rstrip("]").split("-") for name in collected(PRODUCT)]
    assert [len({*values}) for values in zip(*cases, strict=True)] == [2, 3, 3]
    assert [name.partition("[")[2] for name in collected(SKIPPED)] == ["1-y]", "2-y]"]


def test_a_covering_has_all_pairs_that_occur_in_few_rows():
    rows = [row for row in product(range(5), range(4), range(3), range(2)) if row[0] != row[1]]
    found = covering(rows, start=covering(rows, 1))
    pairs = [{pair for at in which for pair in combinations(enumerate(rows[at]), 2)} for which in (found, range(96))]
    assert pairs[0] == pairs[1] and len(found) <= 25


def test_pairwise_has_the_combinations_that_are_allowed(monkeypatch):
    monkeypatch.setenv("FULL", "1")
    mark = pairwise(lambda a, b: a != b, a={"one": 1, "two": 2}, b=(1, 2))
    assert mark.args[0] == ("a", "b")
    assert [(case.id, case.values) for case in mark.args[1]] == [("one-2", (1, 2)), ("two-1", (2, 1))]
