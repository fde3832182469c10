"""search: random search, TPE and a grid of two values, by Optuna."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from partbench import needing

if TYPE_CHECKING:
    import optuna


def search(
    objective: Callable[[dict[str, float]], float],
    space: Mapping[str, tuple[float, float] | optuna.distributions.BaseDistribution],
    trials: int,
    *,
    sampler: str = "random",
    seed: int = 0,
    **options: Any,
) -> optuna.Study:
    """Search hyperparameters with Optuna, with one training per trial.

    For the same cost as one partitioned run of n steps, which are n steps of w and n of ψ, give each of `trials`
    trainings 2 n / trials steps.

    Args:
        objective: trains with the given values and returns a score to maximise, such as the log-likelihood of a
            validation set.
        space: (least, greatest) of each hyperparameter, drawn uniformly, or one of Optuna's distributions.
        trials: number of trials.
        sampler: 'random'; 'tpe' (Bergstra et al. 2011), with the first third, at most ten, at random; or 'grid', all
            combinations of the least and the greatest value of each hyperparameter.
        seed: seed of the sampler.
        options: of optuna.create_study, such as storage=, study_name= and load_if_exists=True to continue a study.

    Returns:
        The study: study.best_params, study.best_value and study.trials. A score of NaN becomes minus infinity. A trial
        that raises FloatingPointError or RuntimeError has failed, and the others go on.

    Example:
        >>> study = search(lambda values: -abs(values["rotation"] - 30), {"rotation": (0, 180)}, trials=20)
        >>> len(study.trials), study.best_value > -30
        (20, True)
    """
    with needing("bench"):
        import optuna
    # By default Optuna's TPE draws the first ten at random, possibly all.
    samplers = {
        "random": optuna.samplers.RandomSampler,
        "tpe": partial(optuna.samplers.TPESampler, n_startup_trials=min(10, -(-trials // 3))),
        "grid": partial(optuna.samplers.GridSampler, space),
    }

    uniform = optuna.distributions.FloatDistribution
    distributions = {name: uniform(*one) if isinstance(one, tuple) else one for name, one in space.items()}

    def scored(trial: optuna.Trial) -> float:
        score = float(objective({name: _suggested(trial, name, one) for name, one in distributions.items()}))
        # NaN: the training diverged.
        return -math.inf if math.isnan(score) else score

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # silences messages for each study and trial
    try:
        study = optuna.create_study(direction="maximize", sampler=samplers[sampler](seed=seed), **options)
        study.optimize(scored, n_trials=trials, catch=(FloatingPointError, RuntimeError))
    finally:
        optuna.logging.set_verbosity(verbosity)
    return study


def _suggested(trial: optuna.Trial, name: str, distribution: Any) -> Any:
    if choices := getattr(distribution, "choices", None):
        return trial.suggest_categorical(name, choices)
    suggest = trial.suggest_float if type(distribution).__name__ == "FloatDistribution" else trial.suggest_int
    return suggest(name, distribution.low, distribution.high, step=distribution.step, log=distribution.log)
