"""Each kind of run selects its tests; a FULL run also has the slice of the weekly tests that its commit chooses."""

from __future__ import annotations

import re
import shlex
import zlib
from itertools import product
from types import SimpleNamespace

import pytest
import tiers
from tiers import SLICE_SECONDS, SLICES, Tier, covering


@pytest.fixture
def ask_for(monkeypatch):
    def ask(name: str, **more: str) -> None:
        for each in ("FULL", "WEEKLY", "SLICE"):
            monkeypatch.delenv(each, raising=False)
        for each, value in ({name: "1"} | more).items():
            monkeypatch.setenv(each, value)

    return ask


class Collected:
    """The tests that pytest collects from a file test_some.py: names without the path, in order."""

    def __init__(self, pytester: pytest.Pytester, source: str) -> None:
        self.pytester = pytester
        pytester.makepyfile(test_some=f"import pytest\n\n{source}")

    def __call__(self, *arguments: str) -> list[str]:
        result = self.pytester.inline_run("--collect-only", "-p", "tiers", *arguments)
        self.status, finished = result.ret, result.getcalls("pytest_collection_finish")
        self.left_out = [name(item) for call in result.getcalls("pytest_deselected") for item in call.items]
        return [name(item) for call in finished for item in call.session.items]


def name(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[2]


@pytest.fixture
def collected(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]")  # ignore this project's configuration
    return lambda source: Collected(pytester, source)


def slice_of(test: str) -> int:
    return zlib.crc32(f"test_some.py::{test}".encode()) % SLICES


MARKED = """
def test_quick(): pass
@pytest.mark.full
def test_slow(): pass
@pytest.mark.weekly
def test_slowest(): pass
"""


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("NEITHER", ["test_quick"]),
        ("FULL", ["test_quick", "test_slow"]),
        ("WEEKLY", ["test_quick", "test_slow", "test_slowest"]),
    ],
)
def test_marks_say_in_which_runs_a_test_is(run, expected, ask_for, collected):
    ask_for(run, **{"SLICE": str(slice_of("test_slowest") + 1)} if run == "FULL" else {})
    tests = collected(MARKED)
    assert tests() == expected
    assert sorted(expected + tests.left_out) == ["test_quick", "test_slow", "test_slowest"]


# Dimensions with equal values and with values that are not hashable.
PRODUCT = """
@pytest.fixture(params=[[1], [1]], ids=["first", "second"])
def made(request): return request.param
@pytest.mark.parametrize(("a", "b"), [(0, 1), (False, 1), (0, True)], ids=["int", "bool", "mixed"])
@pytest.mark.parametrize("c", ["x", "y", "z"])
def test_product(a, b, c, made): pass
"""


@pytest.mark.parametrize(("run", "count"), [("NEITHER", 3), ("FULL", 9), ("WEEKLY", 18)])
def test_products_of_parameters_are_thinned(run, count, ask_for, collected, monkeypatch):
    ask_for(run)
    monkeypatch.setattr(tiers, "slice_number", lambda: None)
    ran = collected(PRODUCT)()
    values = ["int", "bool", "mixed", "x", "y", "z", "first", "second"]
    assert all(any(value in each for each in ran) for value in values)
    assert count <= len(ran) <= 1.5 * count


SOME = """
@pytest.mark.cases(usual=4, full=6)
@pytest.mark.parametrize("n", range(20))
def test_some(n): pass
"""
# pairwise drops rows before pytest collects the tests.
PAIRWISE = """
from pairwise import pairwise
@pytest.mark.cases(full=5)
@pairwise(a=range(4), b=range(5))
def test_few(a, b): pass
@pairwise(a=range(3), b=range(3))
@pytest.mark.parametrize("c", range(3))
@pytest.mark.parametrize("d", range(4))
def test_product_of_pairs(a, b, c, d): pass
"""


@pytest.mark.parametrize("source", [PRODUCT, SOME, MARKED, PAIRWISE])
def test_the_usual_run_is_a_part_of_full(source, ask_for, pytester, collected, monkeypatch):
    monkeypatch.setattr(tiers, "slice_number", lambda: None)
    ran = []
    for run in ("NEITHER", "FULL", "WEEKLY"):
        ask_for(run)
        ran.append(set(collected(source)()))
    assert ran[0] <= ran[1] < ran[2] and len(ran[0]) < len(ran[2])


@pytest.mark.parametrize(("usual", "full"), [(3, 4), (4, 12), (3, 3)])
@pytest.mark.parametrize("lengths", [(3, 3), (2, 3, 2), (3, 112)])
def test_few_cases_of_a_product_have_all_values_that_they_can(usual, full, lengths, ask_for, collected, monkeypatch):
    monkeypatch.setattr(tiers, "slice_number", lambda: None)
    names = "abc"[: len(lengths)]
    marks = "".join(f"@pytest.mark.parametrize('{a}', range({n}))\n" for a, n in zip(names, lengths, strict=True))
    tests = collected(f"@pytest.mark.cases(usual={usual}, full={full})\n{marks}def test_some({', '.join(names)}): pass")
    for run, most in (("NEITHER", usual), ("FULL", full)):
        ask_for(run)
        cases = [each.partition("[")[2].rstrip("]").split("-") for each in tests()]
        assert len(cases) == min(most, len(cases)) >= min(most, *lengths)
        found = sorted(len(set(values)) for values in zip(*cases, strict=True))
        assert found == sorted(min(n, len(cases)) for n in lengths)


def test_values_with_two_names_are_two_values(ask_for, collected):
    ask_for("NEITHER")
    tests = collected("""
@pytest.mark.parametrize("mode", [pytest.param(None, id="one"), pytest.param(None, id="other")])
@pytest.mark.parametrize("c", [1, 2])
def test_some(mode, c): pass
""")
    assert tests() == ["test_some[1-one]", "test_some[2-other]"]


def test_a_covering_may_start_with_another():
    for rows in (list(product(range(5), range(4), range(3), range(2))), [(1, 1), (2, 1), (2, 3), (1, 2)]):
        usual = covering(rows, Tier.USUAL)
        assert set(usual) < set(covering(rows, Tier.FULL, usual)) <= {*range(len(rows))}


def test_a_covering_has_no_test_that_is_skipped(ask_for, collected):
    ask_for("NEITHER")
    tests = collected("""
@pytest.mark.parametrize("a", [
    pytest.param("x", marks=pytest.mark.skipif("True", reason="no")),
    pytest.param("y", marks=pytest.mark.skipif(condition=False, reason="no")),
])
@pytest.mark.parametrize("b", ["1", "2"])
def test_product(a, b): pass
@pytest.mark.skip
@pytest.mark.parametrize("a", ["x", "y"])
@pytest.mark.parametrize("b", ["1", "2"])
def test_nothing(a, b): pass
""")
    assert tests() == [
        "test_product[1-y]",
        "test_product[2-y]",
        *(f"test_nothing[{b}-{a}]" for b in "12" for a in "xy"),
    ]


def test_tests_of_one_function_need_not_be_neighbours(ask_for, collected):
    """Check the order of tests that pytest regroups because they share a module's fixture."""
    ask_for("NEITHER")
    tests = collected("""
@pytest.fixture(params=["x", "y", "z"], scope="module")
def made(request): return request.param
@pytest.mark.parametrize("a", [1, 2, 3])
def test_product(a, made): pass
@pytest.mark.cases(usual=1)
def test_cases(made): pass
""")
    assert tests() == ["test_product[x-1]", "test_cases[x]", "test_product[y-2]", "test_product[z-3]"]


@pytest.mark.parametrize(("usual", "expected"), [(0, []), (1, [0]), (3, [0, 3, 6]), (20, [*range(10)])])
def test_a_run_has_as_many_cases_as_the_mark_says(usual, expected, ask_for, collected):
    tests = collected(f"""
@pytest.mark.cases(usual={usual})
@pytest.mark.parametrize("n", range(10))
def test_some(n): pass
""")
    ask_for("NEITHER")
    assert tests() == [f"test_some[{n}]" for n in expected]
    ask_for("FULL")
    assert len(tests()) == 10


def test_lists_of_cases_are_not_thinned(ask_for, collected):
    ask_for("NEITHER")
    tests = collected("""
@pytest.mark.parametrize("a, b", [(a, b) for a in "wxyz" for b in (1, 2)])
def test_cases(a, b): pass
@pytest.mark.parametrize("a, b", [(a, b) for a in "wxyz" for b in (1, 2)])
@pytest.mark.parametrize("c", "uv")
def test_product(a, b, c): pass
""")
    assert len(tests()) == 8 + 8 and not any("cases" in each for each in tests.left_out)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("test_some.py::test_case", ["test_case[0]", "test_case[1]"]),
        ("./test_some.py::test_case[1]", ["test_case[1]"]),
        ("test_some.py", ["test_quick"]),
        ("test_some.py::test_slow", ["test_slow"]),
        ("test_some.py::TestClass", ["TestClass::test_slow"]),
    ],
)
def test_tests_that_the_command_line_names_run_in_every_run(argument, expected, ask_for, collected):
    ask_for("NEITHER")
    tests = collected(f"""{MARKED}
@pytest.mark.weekly
@pytest.mark.parametrize("n", range(2))
def test_case(n): pass
class TestClass:
    @pytest.mark.full
    def test_slow(self): pass
""")
    assert tests(argument) == expected


CASES = "this mark takes usual= and full= with 0 <= usual <= full and full > 0"
WEEKLY_MARK = "this mark takes in_slices=False or nothing"
BAD = [
    ("cases(usal=3)", f"cases{{'usal': 3}}, but {CASES}"),
    ("cases(usual='3')", f"cases{{'usual': '3'}}, but {CASES}"),
    ("cases(usual=-1)", f"cases{{'usual': -1}}, but {CASES}"),
    ("cases(full=True)", f"cases{{'full': True}}, but {CASES}"),
    ("cases(usual=0, full=0)", f"cases{{'usual': 0, 'full': 0}}, but {CASES}"),
    ("cases(usual=4, full=3)", f"cases{{'usual': 4, 'full': 3}}, but {CASES}"),
    ("cases", f"cases{{}}, but {CASES}"),
    ("full(usual=3)", "full{'usual': 3}, but this mark takes no arguments"),
    ("weekly(False)", f"weekly(False,), but {WEEKLY_MARK}"),
    ("weekly(in_slices=0.5)", f"weekly{{'in_slices': 0.5}}, but {WEEKLY_MARK}"),
    ("full\n@pytest.mark.cases(usual=2)", "changes nothing beside weekly, and usual= nothing beside full"),
    ("weekly\n@pytest.mark.cases(usual=2)", "changes nothing beside weekly, and usual= nothing beside full"),
    ("cases(full=4)\n@pytest.mark.cases(usual=2)", "belongs on a function, once"),
    ("parametrize('n', [pytest.param(1, marks=pytest.mark.cases(usual=0)), 2])", "belongs on a function, once"),
]


@pytest.mark.parametrize("run", ["NEITHER", "FULL", "WEEKLY"])
def test_a_mark_that_is_wrong_or_would_be_ignored_fails_its_test(run, ask_for, collected):
    ask_for(run)
    tests = "\n".join(
        f"@pytest.mark.{mark}\ndef test_{i}({'n' * ('param' in mark)}): pass" for i, (mark, _) in enumerate(BAD)
    )
    result = collected(f"{tests}\ndef test_good(): pass").pytester.runpytest_inprocess("-p", "tiers")
    result.assert_outcomes(errors=len(BAD), passed=2)  # only n=1 has the misplaced mark
    for i, (_, message) in enumerate(BAD):
        assert re.search(rf"test_some\.py::test_{i}\b.*: .*{re.escape(message)}", result.stdout.str())


@pytest.mark.parametrize("name", ["FULL", "WEEKLY"])
def test_a_run_is_asked_for_by_1(name, ask_for):
    for value in ("0", "yes"):
        ask_for(name, **{name: value})
        with pytest.raises(pytest.UsageError, match=f"{name}='{value}'; pass {name}=1, or leave it out"):
            tiers.tier()


def test_a_slice_is_asked_for_in_full_only(ask_for, pytester, capsys):
    for name in ("NEITHER", "WEEKLY"):
        ask_for(name, SLICE="3")
        assert pytester.inline_run("-p", "tiers").ret == pytest.ExitCode.USAGE_ERROR
        assert "SLICE chooses a part of the weekly tests for FULL=1; add FULL=1" in "".join(capsys.readouterr())


def test_a_slice_is_a_number(ask_for):
    ask_for("FULL", SLICE="last")
    with pytest.raises(pytest.UsageError, match="SLICE='last', but slices have numbers; pass one from 0 to 23"):
        tiers.slice_number()


WEEKLY = """
def test_quick(): pass
@pytest.mark.weekly
@pytest.mark.parametrize("n", range(200))
def test_long(n): pass
@pytest.mark.weekly(in_slices=False)
def test_an_hour(): pass
"""


def test_all_slices_together_have_each_weekly_test_once_behind_the_others(ask_for, collected):
    tests, seen = collected(WEEKLY), []
    for number in range(SLICES):
        ask_for("FULL", SLICE=str(number + 3 * SLICES))
        ran = tests()
        assert ran[0] == "test_quick"
        seen += ran[1:]
    assert sorted(seen) == sorted(f"test_long[{n}]" for n in range(200))


def test_commits_begin_their_slice_at_different_tests(ask_for, collected):
    tests, orders = collected(WEEKLY), []
    for number in (5, 5 + SLICES):
        ask_for("FULL", SLICE=str(number))
        orders.append(tests()[1:])
    assert len(orders[0]) > 1 and orders[1] == orders[0][1:] + orders[0][:1]


def test_the_commit_chooses_the_slice(ask_for, monkeypatch):
    ask_for("FULL")
    answer = SimpleNamespace(stdout="001b0000" + 32 * "0" + "\n", returncode=0)
    monkeypatch.setattr(tiers.subprocess, "run", lambda *_, **__: answer)
    assert tiers.slice_number() == 27
    assert tiers.pytest_report_header() == "run: full, with slice 3 of 24 of the weekly tests (SLICE=27)"
    answer.returncode, answer.stdout = 128, ""
    assert tiers.slice_number() is None
    assert tiers.pytest_report_header().startswith("run: full, without a slice of the weekly tests: git reports no")
    ask_for("NEITHER")
    assert tiers.pytest_report_header() == "run: usual"


def test_a_slice_ends_when_its_time_is_over_and_says_how_a_failure_runs_again(ask_for, pytester, monkeypatch):
    pytester.makeini("[pytest]")
    pytester.makepyfile(
        test_some="""
import pytest
def test_quick(): assert False
@pytest.mark.weekly
@pytest.mark.parametrize("n", [f"it's {n}" for n in range(200)])
def test_long(n): assert False
"""
    )
    ask_for("FULL", SLICE="5")
    count = sum(slice_of(f"test_long[it's {n}]") == 5 for n in range(200))
    for spent, outcome in ((0.0, {"failed": 1 + count}), (SLICE_SECONDS + 1.0, {"failed": 1, "skipped": count})):
        monkeypatch.setattr(tiers, "_spent", spent)
        result = pytester.runpytest_inprocess("-p", "tiers", "-rs")
        result.assert_outcomes(**outcome)
        said = result.stdout.str()
        again = shlex.quote("test_some.py::test_long[it's ").rstrip("'")
        assert said.count(f"again: WEEKLY=1 python -m pytest {again}") == outcome["failed"] - 1
        assert (f"the {SLICE_SECONDS} seconds of the weekly slice are over" in said) == ("skipped" in outcome)


def test_coverings_of_each_strength():
    rows = list(product(range(3), "abcd", "+-"))
    assert Tier.USUAL == 1 and len(covering(rows, Tier.USUAL)) == 4
    assert 12 <= len(covering(rows, Tier.FULL)) < 16 and len(covering(rows, 3)) == len(rows)
    assert covering([]) == [] and covering(rows) == covering(rows)
