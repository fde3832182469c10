"""search: hyperparameters by many trainings, of a grid, at random or by Optuna's tree-structured Parzen estimator."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

SAMPLERS = ("random", "tpe", "grid")


@dataclass(frozen=True)
class Trial:
    """One training of a search.

    Attributes:
        values: the hyperparameters.
        score: what the objective gave, the higher the better; minus infinity for NaN.
    """

    values: dict[str, float]
    score: float


def search(
    objective: Callable[[dict[str, float]], float],
    space: Mapping[str, tuple[float, float]],
    trials: int,
    *,
    sampler: str = "random",
    seed: int = 0,
) -> list[Trial]:
    """Tries hyperparameters, one training each.

    For equal compute with one partitioned run of n steps, which are n steps of w and n of ψ, give each of `trials`
    trainings 2 n / trials steps.

    Args:
        objective: trains with the given values and returns a score to be maximised, as the log-likelihood of a
            validation set.
        space: the least and the greatest value of each hyperparameter, in its own units; drawn uniformly.
        trials: how many, at least 1; of a grid of n hyperparameters, an n-th power.
        sampler: 'random'; 'tpe' (Bergstra et al. 2011), whose first third, at most ten, is random as well; or 'grid',
            all combinations of as many values of each, evenly from the least to the greatest, of one its middle.
        seed: of the sampler; a grid has none.

    Returns:
        All trials in their order; the best is max(trials, key=lambda trial: trial.score).

    Raises:
        ValueError: trials is below 1 or no grid has as many, a range is empty, or the sampler is unknown.
        ImportError: Optuna is not installed, which all but 'grid' need.

    Example:
        >>> tried = search(lambda values: -abs(values["rotation"] - 30), {"rotation": (0, 180)}, trials=20)
        >>> len(tried), max(tried, key=lambda trial: trial.score).score > -30
        (20, True)
    """
    if trials < 1:
        raise ValueError(f"trials={trials}; pass at least 1.")
    for name, (low, high) in space.items():
        if not low < high:
            raise ValueError(f"the range of {name} is ({low}, {high}); pass (least, greatest).")
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler={sampler!r}; pass one of {', '.join(SAMPLERS)}.")
    if sampler == "grid":
        return [Trial(values, _score(objective, values)) for values in _grid(space, trials)]
    try:
        import optuna
    except ImportError as error:
        raise ImportError(
            "baselines.search needs Optuna; pip install optuna, or partkernels' extra 'baselines'."
        ) from error
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it reports each study and each trial
    samplers = {
        "random": lambda: optuna.samplers.RandomSampler(seed=seed),
        # Optuna draws its first ten at random, which may be all that there are.
        "tpe": lambda: optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(10, -(-trials // 3))),
    }
    study = optuna.create_study(
        storage=optuna.storages.InMemoryStorage(), sampler=samplers[sampler](), direction="maximize"
    )
    optuna.logging.set_verbosity(verbosity)
    tried = []
    for _ in range(trials):
        trial = study.ask()
        values = {name: trial.suggest_float(name, low, high) for name, (low, high) in space.items()}
        score = _score(objective, values)
        study.tell(trial, score)
        tried.append(Trial(values, score))
    return tried


def _score(objective: Callable[[dict[str, float]], float], values: dict[str, float]) -> float:
    score = float(objective(values))
    # The training diverged; a NaN would come first or last in max by chance.
    return -math.inf if math.isnan(score) else score


def _grid(space: Mapping[str, tuple[float, float]], trials: int) -> list[dict[str, float]]:
    # Optuna's GridSampler ends a study by an error unless Optuna runs the loop.
    each = round(trials ** (1 / len(space))) if space else 1
    if each ** len(space) != trials:
        powers = [count ** len(space) for count in (each - 1, each, each + 1) if count] if space else [1]
        raise ValueError(
            f"trials={trials}, but a grid of {len(space)} hyperparameters has as many trials as some number's power of"
            f" that; pass {' or '.join(map(str, powers))}."
        )
    values = [
        [low + (high - low) * ((i / (each - 1)) if each > 1 else 0.5) for i in range(each)]
        for low, high in space.values()
    ]
    return [dict(zip(space, combination, strict=True)) for combination in itertools.product(*values)]
