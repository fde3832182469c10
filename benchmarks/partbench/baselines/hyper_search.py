"""search: hyperparameters by many trainings: on a grid, at random or by Optuna's tree-structured Parzen estimator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from partbench import needing

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

SAMPLERS = ("random", "tpe", "grid")


def search(
    objective: Callable[[dict[str, Any]], float],
    space: Mapping[str, Sequence[float] | BaseDistribution],
    trials: int,
    *,
    sampler: str | optuna.samplers.BaseSampler = "random",
    seed: int = 0,
    study: optuna.Study | None = None,
    catch: type[Exception] | Sequence[type[Exception]] = (),
) -> optuna.Study:
    """Search hyperparameters with Optuna, with one training per trial.

    For the same cost as one partitioned run of n steps, which are n steps of w and n of ψ, give each of `trials`
    trainings 2 n / trials steps. To prune trainings, call Optuna's study.optimize directly.

    Args:
        objective: trains with the given values and returns a score to maximise, such as the log-likelihood of a
            validation set.
        space: for each hyperparameter, (least, greatest) for uniform numbers, or an Optuna distribution, such as
            FloatDistribution(1e-5, 1e-1, log=True), IntDistribution or CategoricalDistribution.
        trials: number of trials, at least 1; for a grid of n hyperparameters, an n-th power.
        sampler: 'random'; 'tpe' (Bergstra et al. 2011), with the first third, at most ten, at random; 'grid', all
            combinations of equally many values of each, evenly spaced from the least to the greatest, or the middle if
            it is one value; or an Optuna sampler.
        seed: seed of the sampler; a grid needs none.
        study: an existing study that maximises, to continue it or to use its storage; its sampler is replaced.
        catch: exceptions of failed trainings that do not end the search.

    Returns:
        The study: study.best_params, study.best_value and study.trials. A score of NaN becomes minus infinity.

    Raises:
        ValueError: trials is below 1 or not possible for a grid, a range is empty, the sampler is unknown, or the study
            minimises; raised before training.
        ImportError: Optuna is not installed.

    Example:
        >>> study = search(lambda values: -abs(values["rotation"] - 30), {"rotation": (0, 180)}, trials=20)
        >>> len(study.trials), study.best_value > -30
        (20, True)
    """
    with needing("bench"):
        import optuna
    if trials < 1:
        raise ValueError(f"trials={trials}; pass at least 1.")
    given = [name for name, one in space.items() if isinstance(one, optuna.distributions.BaseDistribution)]
    for name, one in space.items():
        if name not in given and not (len(one) == 2 and one[0] < one[1]):
            raise ValueError(f"the range of {name} is {tuple(one)}; pass (least, greatest), or an Optuna distribution.")
    if not (sampler in SAMPLERS or isinstance(sampler, optuna.samplers.BaseSampler)):
        raise ValueError(f"sampler={sampler!r}; pass one of {', '.join(SAMPLERS)}, or an Optuna sampler.")
    if study is not None and study.direction != optuna.study.StudyDirection.MAXIMIZE:
        raise ValueError("the study minimises; pass one of optuna.create_study(direction='maximize').")
    if sampler == "grid" and given:
        raise ValueError(
            f"a grid needs (least, greatest) of {', '.join(given)}; or pass an optuna.samplers.GridSampler."
        )
    if sampler == "grid":
        sampler = optuna.samplers.GridSampler(_grid(space, trials), seed=seed)
    elif sampler == "random":
        sampler = optuna.samplers.RandomSampler(seed=seed)
    elif sampler == "tpe":
        # By default Optuna draws the first ten at random, possibly all.
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(10, -(-trials // 3)))
    space = {
        name: one if name in given else optuna.distributions.FloatDistribution(*one) for name, one in space.items()
    }

    def scored(trial: optuna.Trial) -> float:
        score = float(objective({name: _suggested(trial, name, one) for name, one in space.items()}))
        # NaN: the training diverged.
        return -math.inf if math.isnan(score) else score

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # silences messages for each study and trial
    try:
        if study is None:
            study = optuna.create_study(direction="maximize")
        study.sampler = sampler
        study.optimize(scored, n_trials=trials, catch=catch)
    finally:
        optuna.logging.set_verbosity(verbosity)
    return study


def _suggested(trial: optuna.Trial, name: str, distribution: BaseDistribution) -> Any:
    """Return the trial's value of a hyperparameter."""
    kind = type(distribution).__name__
    if kind == "CategoricalDistribution":
        return trial.suggest_categorical(name, distribution.choices)
    suggest = trial.suggest_float if kind == "FloatDistribution" else trial.suggest_int
    return suggest(name, distribution.low, distribution.high, step=distribution.step, log=distribution.log)


def _grid(space: Mapping[str, Sequence[float]], trials: int) -> dict[str, list[float]]:
    each = round(trials ** (1 / len(space))) if space else 1
    if each ** len(space) != trials:
        powers = [count ** len(space) for count in (each - 1, each, each + 1) if count] if space else [1]
        raise ValueError(
            f"trials={trials}, but a grid of {len(space)} hyperparameters needs n ** {len(space)} trials for an integer"
            f" n; pass {' or '.join(map(str, powers))}."
        )
    return {
        name: [low + (high - low) * ((i / (each - 1)) if each > 1 else 0.5) for i in range(each)]
        for name, (low, high) in space.items()
    }
