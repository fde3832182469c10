"""A search draws values from its space, follows its seed, and with TPE finds values with high scores."""

import itertools
import math

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from partbench.baselines import search

SPACE = {"rotation": (0, 180), "rate": (-3.0, -1.0)}
every_sampler = pytest.mark.parametrize("sampler", ["random", "tpe"])


def values_of(study):
    return [trial.params for trial in study.trials]


def scores_of(study):
    return [trial.value for trial in study.trials]


def score(values):
    return -((values["rotation"] - 40) ** 2) - values["rate"]


@every_sampler
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


def test_a_grid_has_all_combinations_of_the_ends_of_the_ranges():
    study = search(score, SPACE, 4, sampler="grid")
    tried = {tuple(values[name] for name in SPACE) for values in values_of(study)}
    assert tried == set(itertools.product(*SPACE.values())) and len(study.trials) == 4


@every_sampler
def test_a_search_follows_its_seed(sampler):
    first, again, other = (values_of(search(score, SPACE, 15, sampler=sampler, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("seed", range(3))
def test_tpe_comes_to_where_the_score_is_high(seed):
    study = search(lambda values: -((values["x"] - 0.3) ** 2), {"x": (0, 1)}, 40, sampler="tpe", seed=seed)
    scores = scores_of(study)
    assert sum(scores[20:]) / 20 > sum(scores[:10]) / 10
    assert study.best_params["x"] == pytest.approx(0.3, abs=0.05)


def test_distributions_of_optuna_failed_trials_and_studies_that_continue(tmp_path):
    space = {
        "rate": FloatDistribution(1e-5, 1, log=True),
        "layers": IntDistribution(1, 4),
        "kind": CategoricalDistribution(["a", "b"]),
    }
    failures = iter([False, True] * 4)

    def objective(values):
        if next(failures):
            raise FloatingPointError("the loss is nan")
        return -values["layers"]

    options = {"storage": f"sqlite:///{tmp_path / 'study.db'}", "study_name": "one", "load_if_exists": True}
    for count in (4, 8):
        study = search(objective, space, 4, **options)
        assert len(study.trials) == count and len(study.get_trials(states=[TrialState.COMPLETE])) == count / 2
    assert all(1e-5 <= trial.params["rate"] <= 1 and trial.params["kind"] in "ab" for trial in study.trials)


@every_sampler
def test_a_training_that_diverged_is_the_worst(sampler):
    scores = iter([math.nan, -5.0, math.nan, -3.0, -math.inf] * 6)
    study = search(lambda _: next(scores), {"x": (0, 1)}, 30, sampler=sampler)
    assert scores_of(study) == [-math.inf, -5.0, -math.inf, -3.0, -math.inf] * 6
    assert study.best_value == -3.0
