"""tuning: a network with its hyperparameters, and all tuning methods that are compared with self-tuning networks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure, SubFigure
from torch import nn
from torch.utils.data import Dataset

import partnets
from partbench import baselines
from partbench.paper.experiment import Claim, Experiment, Record, Table, lower, of_common_seeds, select, text
from partbench.paper.runs import fit
from partnets import hyper, optim, stn
from partnets.hyper.hyperparameter import hyperparameters

# Trainings of a search. Each takes as many steps as a self-tuning one, which costs less than four times as much.
TRIALS = 5
# Methods with a training each; those of RETRAINED are also trained at their final values and by their schedule.
METHODS = ("stn", "delta", "linear", "untuned", "untuned_delta", "start", "grid", "random", "tpe")
# Values of a schedule in the records.
SHOWN = 100
# Evaluations of the validation loss while a network trains.
LOOKS = 20


@dataclass
class Task:
    """A network to tune, with its data and the settings of its trainings.

    Attributes:
        network: makes the network, at the initial hyperparameters.
        train, validation, test: data sets.
        space: for each hyperparameter, by its dotted name, the least and the greatest value for searches, and whether
            their scale is logarithmic.
        steps, batch_size, lr, clip: of every training.
        hyper_lr, hyper_after, hyper_every, hyper_steps: of self-tuning trainings.
        scale: the initial σ.
        options: further options of stn.convert.
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
    hyper_every: int = 2
    hyper_steps: int = 1
    scale: float = 0.5
    clip: float | None = None
    options: dict = field(default_factory=dict)

    def self_tuning(self, model: nn.Module, chunks: partnets.Chunks, tuned: bool, **options: Any) -> stn.Trainer:
        """Return the trainer of a converted model; without `tuned`, its hyperparameters keep their values."""
        psi = [parameter for parameter in hyperparameters(model) if parameter.requires_grad]
        return stn.Trainer(
            model,
            chunks,
            optimizer=optim.Adam(model, lr=self.lr),
            hyper_optimizer=torch.optim.Adam(psi, lr=self.hyper_lr if tuned else 0.0),
            batch_size=self.batch_size,
            hyper_every=self.hyper_every,
            hyper_steps=self.hyper_steps,
            hyper_after=self.hyper_after,
            clip=self.clip,
            **options,
        )


def tuned(task: Task, method: str, seed: int, checkpoint: Path) -> Record:
    """Train by a method and return the final losses and accuracies."""
    torch.manual_seed(seed)
    tuner = Tuner(task, seed, checkpoint)
    record = getattr(tuner, method)()
    return {"curve": tuner.curve, **record}


class Tuner:
    """A task and a seed; each method of METHODS is a function of the same name that returns numbers.

    Attributes:
        curve: pairs of training seconds, accumulated over networks, and the validation loss at that time.
    """

    def __init__(self, task: Task, seed: int, checkpoint: Path) -> None:
        self.task, self.seed, self.checkpoint = task, seed, checkpoint
        self.curve: list[tuple[float, float]] = []

    # --- the methods ---

    def stn(self) -> Record:
        return self._retrained(centred=False)

    def delta(self) -> Record:
        return self._retrained(centred=True)

    def linear(self) -> Record:
        """Tune by Δ-STN with a response that learns by its linearised loss."""
        return self._self_tuning(tuned=True, centred=True, linearised=True)[0]

    def untuned(self) -> Record:
        """Train with the perturbations of `stn`, at fixed hyperparameters."""
        return self._self_tuning(tuned=False, centred=False)[0]

    def untuned_delta(self) -> Record:
        return self._self_tuning(tuned=False, centred=True)[0]

    def start(self) -> Record:
        """Train at the initial hyperparameters."""
        return self.judged(self.plain({}, "start"))

    def grid(self) -> Record:
        """Try grid points with all hyperparameters at one level of their ranges, from weak to strong."""
        levels, space = [(i + 0.5) / TRIALS for i in range(TRIALS)], self._space()
        tried = [{name: low + level * (high - low) for name, (low, high) in space.items()} for level in levels]
        return self._best([self._tried(values, f"grid{i}") for i, values in enumerate(tried)])

    def random(self) -> Record:
        return self._searched("random")

    def tpe(self) -> Record:
        return self._searched("tpe")

    # --- shared parts ---

    def self_tuned(self, *, tuned: bool = True, **options: bool) -> tuple[nn.Module, partnets.History]:
        """Return a torch.nn network at the hyperparameters that were found, and the history of its training.

        Args:
            tuned: False for a control with fixed hyperparameters.
            **options: of stn.convert.
        """
        task, network = self.task, self._network()
        options = {"scale": task.scale, "learn_scale": tuned, **task.options, **options}
        stn.convert(network, hypers(network), **options)
        model, chunks = partnets.held_out(network, task.train, validation=task.validation)
        trainer = task.self_tuning(model, chunks, tuned, seed=self.seed)
        history = self._fit(trainer, network, self.checkpoint)
        return stn.freeze(network), history

    def _self_tuning(self, *, tuned: bool, **options: bool) -> tuple[Record, dict[str, list[float]]]:
        """Return the record of a self-tuning training, and the value of each hyperparameter at each step."""
        network, history = self.self_tuned(tuned=tuned, **options)
        schedule, every = trajectories(history), max(1, self.task.steps // SHOWN)
        values = {name: [round(v, 5) for v in values[::every]] for name, values in schedule.items()}
        return {**self.judged(network), "curve": list(self.curve), "values": values if tuned else None}, schedule

    def _retrained(self, **options: bool) -> Record:
        """Tune, then train torch.nn networks at the final values and by the schedule."""
        record, schedule = self._self_tuning(tuned=True, **options)
        final = {name: values[-1] for name, values in schedule.items()}
        return {
            **record,
            "final": self.judged(self.plain(final, "final")),
            "schedule": self.judged(self.plain({}, "schedule", schedule)),
        }

    def plain(self, values: Mapping[str, float], name: str, schedule: Mapping[str, list[float]] | None = None):
        """Train a torch.nn network at fixed values, or by a schedule with a value for each step."""
        task, network = self.task, self._network()
        hyper.assign(network, values)
        # Converted so that layers support hyper.DropConnect; the parameters of the response are frozen.
        stn.convert(network, hypers(network))
        for path, parameter in network.named_parameters():
            parameter.requires_grad_(not path.rpartition(".")[2].startswith("hyper_") and not path.endswith("_scale"))
        for parameter in hyperparameters(network):
            parameter.requires_grad_(False)
        model, chunks = partnets.single_chunk(network, task.train)

        def follow(trainer) -> None:
            if trainer.steps < task.steps:
                hyper.assign(network, {name: steps[trainer.steps] for name, steps in schedule.items()})

        trainer = partnets.Trainer(
            model,
            chunks,
            hyper=[],
            optimizer=optim.Adam(model, lr=task.lr),
            batch_size=task.batch_size,
            clip=task.clip,
            seed=self.seed,
            callbacks=[follow] if schedule else [],
        )
        if schedule:
            hyper.assign(network, {name: steps[0] for name, steps in schedule.items()})
        self._fit(trainer, network, self.checkpoint.with_suffix(f".{name}"))
        return network

    def _fit(self, trainer: partnets.Trainer, network: nn.Module, checkpoint: Path) -> partnets.History:
        """Train, and append to the curve; its seconds exclude evaluations of the validation loss."""
        steps, since = self.task.steps, time.perf_counter()

        def look(trainer: partnets.Trainer) -> dict[str, float]:
            nonlocal since
            spent = time.perf_counter() - since
            before = trainer.history.metrics.get("seconds", {"value": [0.0]})["value"][-1]
            metrics = {"seconds": before + spent, "validation": self._loss(network, "validation")}
            since = time.perf_counter()
            return metrics

        trainer.callbacks.append(partnets.callbacks.every(max(1, steps // LOOKS), look))
        metrics = fit(trainer, steps, checkpoint).metrics
        before = self.curve[-1][0] if self.curve else 0.0
        found = zip(metrics["seconds"]["value"], metrics["validation"]["value"], strict=True)
        self.curve += [(round(before + seconds, 2), round(loss, 4)) for seconds, loss in found]
        return trainer.history

    def _searched(self, sampler: str) -> Record:
        found = []

        def objective(values: dict[str, float]) -> float:
            found.append(self._tried(values, f"{sampler}{len(found)}"))
            return -found[-1]["validation"]

        baselines.search(objective, self._space(), TRIALS, sampler=sampler, seed=self.seed)
        return self._best(found)

    def _tried(self, values: dict[str, float], name: str) -> Record:
        values = {name: math.exp(value) if self.task.space[name][2] else value for name, value in values.items()}
        return self.judged(self.plain(values, name))

    def _space(self) -> dict[str, tuple[float, float]]:
        """Return the ranges in which searches draw uniformly; those of logarithmic scales are logarithms."""
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

    def judged(self, network: nn.Module) -> Record:
        found = {name: self._loss(network, name) for name in ("validation", "test")}
        return {**found, "test_accuracy": 100 * partnets.accuracy(network, self.task.test)}

    def _loss(self, network: nn.Module, name: str) -> float:
        return partnets.mean_loss(network, getattr(self.task, name), loss=F.cross_entropy)


def trajectories(history: partnets.History) -> dict[str, list[float]]:
    """Return each hyperparameter's value at each step, by dotted name, for a model of one network."""
    names = [name for name in history.values if not name.endswith(", scale")]
    return {name.removeprefix("networks.0."): history.values[name] for name in names}


def hypers(network: nn.Module) -> list[hyper.Hyperparameter]:
    """Return the outermost modules of hyperparameters."""
    found = [module for module in network.modules() if isinstance(module, hyper.Hyperparameter)]
    inner = {part for module in found for part in module.modules() if part is not module}
    return [module for module in found if module not in inner]


LABELS = {
    "stn": "STN",
    "stn final": "its final values, fixed",
    "stn schedule": "trained by its schedule",
    "delta": "Δ-STN",
    "delta final": "its final values, fixed",
    "delta schedule": "trained by its schedule",
    "linear": "Δ-STN, linearised",
    "untuned": "untuned: STN's perturbation, λ stays",
    "untuned_delta": "untuned: Δ-STN's perturbation, λ stays",
    "start": "start values",
    "grid": f"grid of {TRIALS}",
    "random": f"random search, {TRIALS}",
    "tpe": f"TPE, {TRIALS}",
}
SELF_TUNING, RETRAINED = ("stn", "delta", "linear"), ("stn", "delta")
QUICK = ("stn", "untuned", "start")
QUICK_STEPS = 300
# Digits: the largest final validation loss of a self-tuned network, over that of the untuned control.
BELOW_UNTUNED = 0.9


class Tuning(Experiment):
    """All methods on one task, three seeds; `task` makes the task. Losses are in nats, of the last iterate.

    Attributes:
        steps: of a training, for each data set.
        is_language: whether tables show perplexities instead of accuracies.
    """

    steps: Mapping[str, int]
    partial_results = True
    is_language = False

    def task(self, dataset: str, seed: int, steps: int) -> Task:
        raise NotImplementedError

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        steps = QUICK_STEPS if quick else self.steps[dataset]
        return [
            {"dataset": dataset, "method": method, "seed": seed, "steps": steps}
            for seed in seeds
            for method in (QUICK if quick else METHODS)
        ]

    def train(self, setting: Record, checkpoint: Path) -> Record:
        task = self.task(setting["dataset"], setting["seed"], setting["steps"])
        return tuned(task, setting["method"], setting["seed"], checkpoint)

    def table(self, found: pd.DataFrame) -> Table:
        rows = []
        for method, mine in _by_method(found).items():
            seconds = text(mine.curve.map(lambda curve: curve[-1][0]), 0) if method in METHODS else ""
            quality = mine.test.map(math.exp) if self.is_language else mine.test_accuracy
            rows.append([LABELS[method], text(mine.validation, 3), text(mine.test, 3), text(quality), seconds])
        quality = "test perplexity" if self.is_language else "test accuracy, %"
        return ["", "validation loss", "test loss", quality, "seconds"], rows

    def draw(self, found: pd.DataFrame) -> Figure:
        """Plot the lowest validation loss so far over the seconds, and each hyperparameter over the steps."""
        learned = found[found.method.isin(SELF_TUNING)]
        names = list(learned.iloc[0]["values"]) if len(learned) else []
        columns = 4
        lines = -(-len(names) // columns)
        figure = Figure(figsize=(3 * columns, 3 + 2.2 * lines), layout="constrained")
        if not names:
            _draw_seconds(figure, found)
            return figure
        above, below = figure.subfigures(2, 1, height_ratios=(3, 2.2 * lines))
        _draw_seconds(above, found)
        panels = list(below.subplots(lines, columns, squeeze=False).flat)
        colours = {"stn": "tab:blue", "delta": "tab:orange", "linear": "tab:green"}
        for axes, name in zip(panels, names, strict=False):
            for _, run in learned.iterrows():
                values = run["values"][name]
                steps = [run.steps * i / len(values) for i in range(len(values))]
                label = LABELS[run.method] if run.seed == learned.seed.min() else None
                axes.plot(steps, values, color=colours[run.method], linewidth=1, label=label)
            axes.set_title(name, size="small")
        for axes in panels[len(names) :]:
            axes.set_axis_off()
        below.axes[0].legend(fontsize="small")
        return figure

    def claims(self, found: pd.DataFrame) -> list[Claim]:
        methods, claims = _by_method(found), []
        for method in SELF_TUNING:
            if method not in methods:
                continue
            label = LABELS[method]
            # For each other method, the trainings of both with common seeds.
            both = {other: of_common_seeds(methods[method], methods[other]) for other in methods}
            both = {other: pair for other, pair in both.items() if len(pair[0])}
            control = "untuned" if method == "stn" else "untuned_delta"
            if control in both:
                ours, theirs = both[control]
                below = ours.validation.mean() / theirs.validation.mean()
                least = f"{label}: validation loss at most {BELOW_UNTUNED} of the untuned control's"
                claims.append(Claim(least, f"{below:.2f} of it", bool(below <= BELOW_UNTUNED)))
            for other in ("start", "grid", "random", "tpe", f"{method} final", f"{method} schedule"):
                if other in both:
                    ours, theirs = both[other]
                    claims.append(lower(f"{label}: test loss below {LABELS[other]}", ours.test, theirs.test))
            if "tpe" in both:
                curves = (one.curve for one in both["tpe"])
                shares = [_share_of_time(*pair) for pair in zip(*curves, strict=True)]
                found = ", ".join(f"{share:.2f}" if share < math.inf else "never" for share in shares)
                claim = f"{label}: the validation loss of TPE's end in a quarter of its seconds"
                claims.append(Claim(claim, f"{found} of them", max(shares) <= 0.25))
            if f"{method} schedule" in methods:
                schedule, final = methods[f"{method} schedule"], methods[f"{method} final"]
                claim = f"{label}: its schedule does better than its final values"
                claims.append(lower(claim, schedule.test, final.test))
        return claims


def _draw_seconds(figure: Figure | SubFigure, found: pd.DataFrame) -> None:
    """Plot a panel for each seed."""
    seeds = sorted(found.seed.unique())
    for axes, seed in zip(figure.subplots(1, len(seeds), sharey=True, squeeze=False).flat, seeds, strict=True):
        for method in METHODS:
            for curve in select(found, method=method, seed=seed).curve:
                seconds, losses = zip(*curve, strict=True)
                axes.plot(seconds, list(accumulate(losses, min)), linewidth=1, label=LABELS[method])
        axes.set(xlabel="seconds of training", title=f"seed {seed}", yscale="log")
    figure.axes[0].set(ylabel="lowest validation loss so far")
    figure.legend(*figure.axes[-1].get_legend_handles_labels(), loc="outside right upper", fontsize="x-small")


def _share_of_time(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> float:
    """Return when ours is as low as their lowest loss, over the seconds of their whole training."""
    lowest = min(loss for _, loss in theirs)
    return min((seconds for seconds, loss in ours if loss <= lowest), default=math.inf) / theirs[-1][0]


def _by_method(found: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return each method's trainings, and those at the values that self-tuning found, in the table's order."""
    methods = {method: select(found, method=method) for method in METHODS}
    for method in RETRAINED:
        mine = methods[method]
        for kind in ("final", "schedule") if len(mine) else ():
            methods[f"{method} {kind}"] = pd.DataFrame([*mine[kind]]).assign(seed=[*mine.seed])
    return {method: methods[method] for method in LABELS if len(methods.get(method, ()))}
