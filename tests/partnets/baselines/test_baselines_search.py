"""A search tries values of its space, follows its seed, and by TPE comes to where the score is high."""

import math
import sys

import pytest

from partnets.baselines import search

SPACE = {"rotation": (0, 180), "rate": (-3.0, -1.0)}
SAMPLERS = ["random", "tpe"]


def score(values):
    return -((values["rotation"] - 40) ** 2) - values["rate"]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_each_trial_is_within_the_space_and_has_the_objectives_score(sampler):
    given = []

    def objective(values):
        given.append(dict(values))
        return score(values)

    tried = search(objective, SPACE, 15, sampler=sampler)
    assert [trial.values for trial in tried] == given and len(tried) == 15
    assert [trial.score for trial in tried] == [score(values) for values in given]
    for values in given:
        assert list(values) == list(SPACE)
        assert all(low <= values[name] <= high for name, (low, high) in SPACE.items())
    assert len({values["rotation"] for values in given}) == 15


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_search_follows_its_seed(sampler):
    first, again, other = (search(score, SPACE, 15, sampler=sampler, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_random_trials_do_not_depend_on_the_scores():
    first, other = (search(objective, SPACE, 15) for objective in (score, lambda values: -score(values)))
    assert [trial.values for trial in first] == [trial.values for trial in other]


def test_random_trials_are_uniform():
    rotations = sorted(trial.values["rotation"] / 180 for trial in search(score, SPACE, 200))
    # The Kolmogorov-Smirnov distance exceeds 1.63 / sqrt(n) by chance once in a hundred.
    assert max(abs((i + 0.5) / 200 - value) for i, value in enumerate(rotations)) < 1.63 / math.sqrt(200)


@pytest.mark.parametrize("seed", range(3))
def test_tpe_comes_to_where_the_score_is_high(seed):
    tried = search(lambda values: -((values["x"] - 0.3) ** 2), {"x": (0, 1)}, 40, sampler="tpe", seed=seed)
    scores = [trial.score for trial in tried]
    assert sum(scores[20:]) / 20 > sum(scores[:10]) / 10
    assert max(tried, key=lambda trial: trial.score).values["x"] == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_training_that_diverged_is_the_worst(sampler):
    scores = iter([math.nan, -5.0, math.nan, -3.0, -math.inf] * 6)
    tried = search(lambda _: next(scores), {"x": (0, 1)}, 30, sampler=sampler)
    assert [trial.score for trial in tried] == [-math.inf, -5.0, -math.inf, -3.0, -math.inf] * 6
    assert max(tried, key=lambda trial: trial.score).score == -3.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trials": 0}, "trials=0; pass at least 1"),
        ({"space": {"x": (1, 1)}}, r"the range of x is \(1, 1\); pass \(least, greatest\)"),
        ({"space": {"y": (0, 1), "x": (2, 1)}}, "the range of x"),
        ({"space": {"x": (0, math.nan)}}, "the range of x"),
        ({"sampler": "sobol"}, "sampler='sobol'; pass one of random, tpe, grid"),
        ({"sampler": "grid", "space": SPACE, "trials": 10}, "trials=10, but a grid of 2 .*; pass 4 or 9 or 16"),
    ],
)
def test_what_cannot_be_searched_raises_before_any_training(arguments, message):
    called = []
    with pytest.raises(ValueError, match=message):
        search(called.append, **{"space": {"x": (0, 1)}, "trials": 3} | arguments)
    assert not called


@pytest.mark.parametrize(
    ("trials", "rotations", "rates"),
    [(1, [90.0], [-2.0]), (4, [0.0, 180.0], [-3.0, -1.0]), (9, [0.0, 90.0, 180.0], [-3.0, -2.0, -1.0])],
)
def test_a_grid_divides_each_range_evenly(trials, rotations, rates):
    tried = search(score, SPACE, trials, sampler="grid")
    expected = [{"rotation": rotation, "rate": rate} for rotation in rotations for rate in rates]
    assert [trial.values for trial in tried] == expected
    assert [trial.score for trial in tried] == [score(values) for values in expected]


def test_a_grid_needs_no_library_and_takes_a_training_that_diverged_for_the_worst(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    tried = search(lambda values: math.nan if values["x"] else 1.0, {"x": (0, 1)}, 3, sampler="grid")
    assert [trial.score for trial in tried] == [1.0, -math.inf, -math.inf]


def test_an_objective_that_raises_ends_the_search():
    def fails(values):
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        search(fails, SPACE, 3)


def test_a_missing_library_is_named_with_the_cure(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "optuna"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match="pip install optuna, or partkernels' extra 'baselines'"):
        search(score, SPACE, 3)
