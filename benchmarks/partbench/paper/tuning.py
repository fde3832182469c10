"""tuning: one network, its hyperparameters, and every way to tune them that self-tuning networks are compared with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import Dataset

import partnets
from partbench.paper.experiment import Claim, Experiment, Record, Table, select, text
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
        return self._judged(self.plain({}, "start"))

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
        fixed = self.plain(final, "final")
        record["plain_seconds"] = round(time.perf_counter() - start, 1)
        return {
            **record,
            "final": self._judged(fixed),
            "schedule": self._judged(self.plain({}, "schedule", schedule)),
            "values": {name: [round(v, 5) for v in values[::every]] for name, values in schedule.items()},
            "scales": {name: history.values[f"{name}, scale"][-1] for name in names},
        }

    def plain(self, values: Mapping[str, float], name: str, schedule: Mapping[str, list[float]] | None = None):
        """An ordinary training at fixed values, or by a schedule of a value for each step."""
        task, network = self.task, self._network()
        hyper.assign(network, values)
        # So that layers know hyper.DropConnect; nothing responds, and nothing of it learns.
        stn.convert(network, hypers(network))
        for path, parameter in network.named_parameters():
            parameter.requires_grad_(not path.rpartition(".")[2].startswith("hyper_") and not path.endswith("_scale"))
        for parameter in hyperparameters(network):
            parameter.requires_grad_(False)
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
        return self._judged(self.plain(values, name))

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


LABELS = {
    "stn": "STN",
    "stn final": "its final values, fixed",
    "stn schedule": "trained by its schedule",
    "delta": "Δ-STN",
    "delta final": "its final values, fixed",
    "delta schedule": "trained by its schedule",
    "untuned": "untuned: STN's perturbation, λ stays",
    "untuned_delta": "untuned: Δ-STN's perturbation, λ stays",
    "start": "start values",
    "grid": f"grid of {TRIALS}",
    "random": f"random search, {TRIALS}",
    "tpe": f"TPE, {TRIALS}",
}
# Δ-STN's start at 0, and STN's is of its own.
SELF_TUNING = ("stn", "delta")
QUICK = ("stn", "untuned", "start")
QUICK_STEPS = 300
# Digits: what the last iterate of a self-tuned network must reach of the untuned one's validation loss.
BELOW_UNTUNED = 0.9


class Tuning(Experiment):
    """All methods on one task, three seeds; `task` makes it. Losses are in nats, of the last iterate."""

    steps: Mapping[str, int]

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
            seconds = text(mine.tuning_seconds, 0) if method in METHODS else ""
            losses = text(mine.validation, 3), text(mine.test, 3)
            rows.append([LABELS[method], *losses, text(mine.test.map(math.exp), 1), text(mine.test_accuracy), seconds])
        head = ["", "validation loss", "test loss", "test perplexity", "test accuracy, %", "seconds"]
        return head, rows

    def draw(self, found: pd.DataFrame) -> Figure:
        """Each hyperparameter over the steps, of each seed, and with each method that learns it."""
        learned = found[found["values"].map(lambda values: isinstance(values, dict))]
        names = list(learned.iloc[0]["values"])
        columns = 4
        lines = -(-len(names) // columns)
        figure = Figure(figsize=(3 * columns, 2.2 * lines), layout="constrained")
        panels = figure.subplots(lines, columns, squeeze=False).flat
        colours = {"stn": "tab:blue", "delta": "tab:orange"}
        for axes, name in zip(panels, names, strict=False):
            for _, run in learned.iterrows():
                values = run["values"][name]
                steps = [run.steps * i / len(values) for i in range(len(values))]
                label = LABELS[run.method] if run.seed == learned.seed.min() else None
                axes.plot(steps, values, color=colours[run.method], linewidth=1, label=label)
            axes.set_title(name, size="small")
        for axes in list(panels):
            axes.set_axis_off()
        figure.axes[0].legend(fontsize="small")
        return figure

    def claims(self, found: pd.DataFrame) -> list[Claim]:
        methods, claims = _by_method(found), []
        for method in SELF_TUNING:
            if method not in methods:
                continue
            ours, label = methods[method], LABELS[method]
            control = methods["untuned" if method == "stn" else "untuned_delta"]
            below = ours.validation.mean() / control.validation.mean()
            least = f"{label}: validation loss at most {BELOW_UNTUNED} of the untuned control's"
            claims.append(Claim(least, f"{below:.2f} of it", bool(below <= BELOW_UNTUNED)))
            for other in ("start", "grid", "random", "tpe", f"{method} final", f"{method} schedule"):
                if other in methods:
                    claims.append(_lower(f"{label}: test loss below {LABELS[other]}", ours, methods[other]))
            if f"{method} schedule" in methods:
                schedule, final = methods[f"{method} schedule"], methods[f"{method} final"]
                claims.append(_lower(f"{label}: its schedule does better than its final values", schedule, final))
        return claims


def _lower(claim: str, ours: pd.DataFrame, theirs: pd.DataFrame) -> Claim:
    numbers = f"{text(ours.test, 3)} and {text(theirs.test, 3)}"
    return Claim(claim, numbers, bool(ours.test.mean() < theirs.test.mean()))


def _by_method(found: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The trainings of each method, and those by the values that a self-tuned network found, in the table's order."""
    methods = {method: select(found, method=method) for method in METHODS}
    for method in SELF_TUNING:
        for kind in ("final", "schedule"):
            if len(methods[method]):
                methods[f"{method} {kind}"] = pd.DataFrame(list(methods[method][kind]))
    return {method: methods[method] for method in LABELS if len(methods.get(method, ()))}
