"""A search draws values from its space, follows its seed, and with TPE finds values with high scores."""

import math
import sys

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from partbench.baselines import search

SPACE = {"rotation": (0, 180), "rate": (-3.0, -1.0)}
SAMPLERS = ["random", "tpe"]


def values_of(study):
    return [trial.params for trial in study.trials]


def scores_of(study):
    return [trial.value for trial in study.trials]


def score(values):
    return -((values["rotation"] - 40) ** 2) - values["rate"]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_each_trial_is_within_the_space_and_has_the_objectives_score(sampler):
    given = []

    def objective(values):
        given.append(dict(values))
        return score(values)

    study = search(objective, SPACE, 15, sampler=sampler)
    assert values_of(study) == given and len(study.trials) == 15
    assert scores_of(study) == [score(values) for values in given]
    for values in given:
        assert list(values) == list(SPACE)
        assert all(low <= values[name] <= high for name, (low, high) in SPACE.items())
    assert len({values["rotation"] for values in given}) == 15
    assert study.best_value == max(scores_of(study))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_search_follows_its_seed(sampler):
    first, again, other = (values_of(search(score, SPACE, 15, sampler=sampler, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_random_trials_do_not_depend_on_the_scores():
    first, other = (values_of(search(objective, SPACE, 15)) for objective in (score, lambda values: -score(values)))
    assert first == other


@pytest.mark.parametrize("seed", range(3))
def test_tpe_comes_to_where_the_score_is_high(seed):
    study = search(lambda values: -((values["x"] - 0.3) ** 2), {"x": (0, 1)}, 40, sampler="tpe", seed=seed)
    scores = scores_of(study)
    assert sum(scores[20:]) / 20 > sum(scores[:10]) / 10
    assert study.best_params["x"] == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_training_that_diverged_is_the_worst(sampler):
    scores = iter([math.nan, -5.0, math.nan, -3.0, -math.inf] * 6)
    study = search(lambda _: next(scores), {"x": (0, 1)}, 30, sampler=sampler)
    assert scores_of(study) == [-math.inf, -5.0, -math.inf, -3.0, -math.inf] * 6
    assert study.best_value == -3.0


@pytest.mark.parametrize("sampler", [*SAMPLERS, optuna.samplers.NSGAIISampler(seed=1)])
def test_optunas_distributions_are_taken(sampler):
    space = {"lr": FloatDistribution(1e-5, 1e-1, log=True), "layers": IntDistribution(1, 5, step=2)}
    space["kind"] = CategoricalDistribution(["SGD", "Adam"])
    study = search(lambda values: -values["lr"], space, 30, sampler=sampler)
    found = values_of(study)
    assert sum(values["lr"] < 1e-3 for values in found) > 8  # two of the four orders of magnitude
    assert {values["layers"] for values in found} == {1, 3, 5} and {values["kind"] for values in found} == {
        "SGD",
        "Adam",
    }


def test_a_failing_training_loses_no_other_and_a_study_goes_on(tmp_path):
    storage, name = f"sqlite:///{tmp_path / 'trials.db'}", "search"
    scores = iter([1.0, RuntimeError("no memory"), 3.0])

    def objective(values):
        found = next(scores)
        if isinstance(found, Exception):
            raise found
        return found

    study = optuna.create_study(storage=storage, study_name=name, direction="maximize")
    with pytest.raises(RuntimeError, match="no memory"):
        search(objective, SPACE, 3, study=study)
    study = optuna.load_study(storage=storage, study_name=name)
    assert scores_of(study) == [1.0, None]
    scores = iter([RuntimeError("no memory"), 3.0])
    assert search(objective, SPACE, 2, study=study, catch=RuntimeError) is study
    assert scores_of(study) == [1.0, None, None, 3.0] and study.best_value == 3.0
    with pytest.raises(ValueError, match="the study minimises"):
        search(objective, SPACE, 2, study=optuna.create_study())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trials": 0}, "trials=0; pass at least 1"),
        ({"space": {"x": (1, 1)}}, r"the range of x is \(1, 1\); pass \(least, greatest\)"),
        ({"space": {"y": (0, 1), "x": (2, 1)}}, "the range of x"),
        ({"space": {"x": (0, math.nan)}}, "the range of x"),
        ({"sampler": "sobol"}, "sampler='sobol'; pass one of random, tpe, grid"),
        ({"sampler": "grid", "space": SPACE, "trials": 10}, "trials=10, but a grid of 2 .*; pass 4 or 9 or 16"),
        ({"sampler": "grid", "space": {"x": IntDistribution(1, 3)}}, "a grid needs .least, greatest. of x"),
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
    study = search(score, SPACE, trials, sampler="grid")
    expected = [{"rotation": rotation, "rate": rate} for rotation in rotations for rate in rates]
    assert sorted(values_of(study), key=lambda values: (values["rotation"], values["rate"])) == expected
    assert scores_of(study) == [score(values) for values in values_of(study)]


def test_a_missing_library_is_named_with_the_cure(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "optuna"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match="optuna is missing; install partkernels' extra 'bench'"):
        search(score, SPACE, 3)
