"""tuning: one network, its hyperparameters, and every way to tune them that self-tuning networks are compared with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import partnets
from partbench.paper.experiment import Record
from partbench.paper.runs import fit
from partnets import baselines, hyper, optim, stn
from partnets.hyper.hyperparameter import hyperparameters

# Each training of a search takes as many steps as a self-tuning one, which costs less than four times as much.
TRIALS = 5
# The methods that are a training of their own. "stn" and "delta" also train by their final values and their schedule.
METHODS = ("stn", "delta", "untuned", "untuned_delta", "start", "grid", "random", "tpe")
# Rows of a schedule in the records.
SHOWN = 100


@dataclass
class Task:
    """What is tuned.

    Attributes:
        network: makes it, at the hyperparameters from which tuning starts.
        train, validation, test: data sets.
        space: of each hyperparameter, by its dotted name, the least and the greatest value that searches try, and
            whether they try them by orders of magnitude.
        steps, batch_size, lr, hyper_lr, hyper_after: of training.
        loss, plain: that of training, and that by which all are judged.
        scale: σ at the start.
        options: others of stn.convert.
    """

    network: Callable[[], nn.Module]
    train: Dataset
    validation: Dataset
    test: Dataset
    space: Mapping[str, tuple[float, float, bool]]
    steps: int
    batch_size: int
    lr: float
    hyper_lr: float
    hyper_after: int
    scale: float = 0.5
    clip: float | None = None
    options: dict = field(default_factory=dict)
    training: dict = field(default_factory=dict)


def tuned(task: Task, method: str, seed: int, checkpoint: Path) -> Record:
    """The losses and accuracies that a method ends with."""
    torch.manual_seed(seed)
    tuner = Tuner(task, seed, checkpoint)
    start = time.perf_counter()
    record = getattr(tuner, method)()
    return {**record, "tuning_seconds": round(time.perf_counter() - start, 1)}


class Tuner:
    """A task and a seed; each method of METHODS is a function of the same name that gives numbers."""

    def __init__(self, task: Task, seed: int, checkpoint: Path) -> None:
        self.task, self.seed, self.checkpoint = task, seed, checkpoint

    # --- the methods ---

    def stn(self) -> Record:
        return self._self_tuning(centred=False, tuned=True)

    def delta(self) -> Record:
        return self._self_tuning(centred=True, tuned=True)

    def untuned(self) -> Record:
        """Perturbed as by `stn`, at hyperparameters that stay."""
        return self._self_tuning(centred=False, tuned=False)

    def untuned_delta(self) -> Record:
        return self._self_tuning(centred=True, tuned=False)

    def start(self) -> Record:
        """At the values from which tuning starts."""
        return self._judged(self._plain({}, "start"))

    def grid(self) -> Record:
        """All hyperparameters at one level of their ranges, from weak to strong."""
        levels, space = [(i + 0.5) / TRIALS for i in range(TRIALS)], self._space()
        tried = [{name: low + level * (high - low) for name, (low, high) in space.items()} for level in levels]
        return self._best([self._tried(values, f"grid{i}") for i, values in enumerate(tried)])

    def random(self) -> Record:
        return self._searched("random")

    def tpe(self) -> Record:
        return self._searched("tpe")

    # --- what they are made of ---

    def _self_tuning(self, *, centred: bool, tuned: bool) -> Record:
        task, network = self.task, self._network()
        options = {"centred": centred, "scale": task.scale, **task.options}
        stn.convert(network, hypers(network), learn_scale=tuned, **options)
        model, chunks = baselines.held_out(network, task.train, validation=task.validation)
        psi = [parameter for parameter in hyperparameters(model) if parameter.requires_grad]
        trainer = stn.Trainer(
            model,
            chunks,
            optimizer=optim.Adam(model, lr=task.lr),
            hyper_optimizer=torch.optim.Adam(psi, lr=task.hyper_lr if tuned else 0.0),
            batch_size=task.batch_size,
            hyper_every=2,
            hyper_after=task.hyper_after,
            clip=task.clip,
            seed=self.seed,
            **task.training,
        )
        start = time.perf_counter()
        history = fit(trainer, task.steps, self.checkpoint)
        seconds = time.perf_counter() - start
        record = {**self._judged(stn.freeze(network)), "stn_seconds": round(seconds, 1)}
        if not tuned:
            return record
        names = [name for name in history.values if not name.endswith(", scale")]
        schedule = {name.removeprefix("networks.0."): history.values[name] for name in names}
        every = max(1, task.steps // SHOWN)
        final = {name: values[-1] for name, values in schedule.items()}
        start = time.perf_counter()
        fixed = self._plain(final, "final")
        record["plain_seconds"] = round(time.perf_counter() - start, 1)
        return {
            **record,
            "final": self._judged(fixed),
            "schedule": self._judged(self._plain({}, "schedule", schedule)),
            "values": {name: [round(v, 5) for v in values[::every]] for name, values in schedule.items()},
            "scales": {name: history.values[f"{name}, scale"][-1] for name in names},
        }

    def _plain(self, values: Mapping[str, float], name: str, schedule: Mapping[str, list[float]] | None = None):
        """An ordinary training at fixed values, or by a schedule of a value for each step."""
        task, network = self.task, self._network()
        hyper.assign(network, values)
        model, chunks = baselines.whole(network, task.train)

        def follow(trainer) -> None:
            if trainer.steps < task.steps:
                hyper.assign(network, {name: steps[trainer.steps] for name, steps in schedule.items()})

        trainer = partnets.Trainer(
            model,
            chunks,
            optimizer=optim.Adam(model, lr=task.lr),
            batch_size=task.batch_size,
            clip=task.clip,
            seed=self.seed,
            callbacks=[follow] if schedule else [],
            **task.training,
        )
        if schedule:
            hyper.assign(network, {name: steps[0] for name, steps in schedule.items()})
        fit(trainer, task.steps, self.checkpoint.with_suffix(f".{name}"))
        return network

    def _searched(self, sampler: str) -> Record:
        found = []

        def objective(values: dict[str, float]) -> float:
            found.append(self._tried(values, f"{sampler}{len(found)}"))
            return -found[-1]["validation"]

        baselines.search(objective, self._space(), TRIALS, sampler=sampler, seed=self.seed)
        return self._best(found)

    def _tried(self, values: dict[str, float], name: str) -> Record:
        values = {name: math.exp(value) if self.task.space[name][2] else value for name, value in values.items()}
        return self._judged(self._plain(values, name))

    def _space(self) -> dict[str, tuple[float, float]]:
        """The ranges in which searches draw uniformly: of logarithms, for orders of magnitude."""
        return {
            name: (math.log(low), math.log(high)) if by_orders else (low, high)
            for name, (low, high, by_orders) in self.task.space.items()
        }

    def _best(self, found: list[Record]) -> Record:
        best = min(found, key=lambda record: record["validation"])
        return {**best, "tried": [round(record["validation"], 4) for record in found]}

    def _network(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return self.task.network()

    def _judged(self, network: nn.Module) -> Record:
        found = {}
        for name in ("validation", "test"):
            data = getattr(self.task, name)
            found[name] = partnets.mean_loss(network.eval(), data, loss=F.cross_entropy)
            found[f"{name}_accuracy"] = 100 * partnets.accuracy(network, data)
        return found


def hypers(network: nn.Module) -> list[hyper.Hyperparameter]:
    """The outermost modules of hyperparameters."""
    found = [module for module in network.modules() if isinstance(module, hyper.Hyperparameter)]
    inner = {part for module in found for part in module.modules() if part is not module}
    return [module for module in found if module not in inner]
