"""The peers of partnets.tune: searches with a validation set and a refit, at a budget of examples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from partnets.tuning.problem import Problem
from partnets.tuning.training import Training

# A moderate guess, as fractions of ranges: dropout 0.3, decay 1e-3, smoothing 0.15 and light augmentation.
GUESS = {"dropout": 1 / 3, "weight_decay": 0.5, "label_smoothing": 1 / 6}
GUESS_OTHERS = 0.2
TRIALS = 9
# So many trials take about the seconds of tune, if a step takes 20 ms or more.
TRIALS_IN_SECONDS = 15


@dataclass
class Judge:
    """A function that trains at positions on D_1 and returns the loss on D_2 in nats; it counts the examples.

    A trial has 1/TRIALS of the steps or, if batches=True, of each batch, as the trainings of tune.
    """

    problem: Problem
    seed: int
    batches: bool = False
    examples: float = 0.0

    def __call__(self, positions: Tensor) -> float:
        """Return the loss after a trial."""
        steps, batch_size = math.ceil(self.problem.steps / TRIALS), self.problem.batch_size
        if self.batches:
            steps, batch_size = self.problem.steps, batch_size / TRIALS
        options = {"batch_size": batch_size, "steps": steps, "seed": self.seed, "judgements": 1}
        training = Training(self.problem, positions.tolist(), **options)
        training.run(steps)
        self.examples += training.examples
        return training.judged[-1]


def untuned(problem: Problem, judge: Judge) -> Tensor:
    return torch.tensor([setting.position for setting in problem.settings])


def guess(problem: Problem, judge: Judge, trials: int) -> Tensor:
    """Return a fixed guess, which costs nothing and leaves the learning rate unchanged."""
    found = []
    for setting in problem.settings:
        name = setting.group or setting.name
        found.append(setting.position if name == "learning_rate" else GUESS.get(name, GUESS_OTHERS))
    return torch.tensor(found)


def sobol(problem: Problem, judge: Judge, trials: int) -> Tensor:
    """Return the best of an untuned training and Sobol points."""
    engine = torch.quasirandom.SobolEngine(len(problem.settings), scramble=True, seed=judge.seed % 2**31)
    points = torch.cat([untuned(problem, judge)[None], engine.draw(trials - 1)])
    return points[int(torch.tensor([judge(point) for point in points]).argmin())]


def _optuna(sampler: Callable) -> Callable:
    def search(problem: Problem, judge: Judge, trials: int) -> Tensor:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        names = [setting.name for setting in problem.settings]

        def objective(trial) -> float:
            nats = judge(torch.tensor([trial.suggest_float(name, 0.0, 1.0) for name in names]))
            return nats if math.isfinite(nats) else 1e9

        study = optuna.create_study(sampler=sampler(optuna)(seed=judge.seed % 2**31))
        positions = dict(zip(names, untuned(problem, judge).tolist(), strict=True))
        study.enqueue_trial(positions)
        study.optimize(objective, n_trials=trials)
        return torch.tensor([study.best_params[name] for name in names])

    return search


random = _optuna(lambda optuna: optuna.samplers.RandomSampler)
tpe = _optuna(lambda optuna: optuna.samplers.TPESampler)
SEARCHES = {"guess": guess, "sobol": sobol, "random": random, "tpe": tpe}
