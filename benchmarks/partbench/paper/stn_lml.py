"""Self-tuning networks without a validation set: a partitioned network tunes its regularisation by L_ML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import TensorDataset

import partnets
from partbench.paper.experiment import Claim, Experiment, Record, Table, lower, registered, select, text
from partbench.paper.runs import fit
from partbench.paper.stn_cnn import digits_task
from partbench.paper.stn_lstm import documentation_task
from partbench.paper.tuning import Task, Tuner, hypers
from partnets import stn

PROPORTIONS = (0.8, 0.1, 0.1)
VALIDATION = 0.2
LABELS = {
    "lml": "STN on L_ML, all data",
    "lml_untuned": "partitioned, all data, λ stays",
    "fifth": "STN, a fifth for validation",
    "fifth_untuned": "a fifth for validation, λ stays",
    "all": "start values, one network, all data",
}
STEPS, QUICK_STEPS = {"digits": 3000, "documentation": 1000}, 200
# The number of evaluations of L_ML.
EVALUATIONS = 10


class Unheld:
    """A task with its training and validation sets merged."""

    def __init__(self, task: Task, setting: Record, checkpoint: Path) -> None:
        self.task, self.checkpoint, self.seed = task, checkpoint, setting["seed"]
        pairs = zip(task.train.tensors, task.validation.tensors, strict=True)
        self.data = TensorDataset(*(torch.cat(pair) for pair in pairs))
        self.tuned = not setting["method"].endswith("_untuned")

    def lml(self) -> Record:
        network = self._converted()
        model = partnets.partition(network, PROPORTIONS, defaults="stored", seed=self.seed)
        history = self._fit(model, partnets.chunk(self.data, PROPORTIONS, seed=self.seed))
        return {**self._judged(model), "lml": history.lml}

    def fifth(self) -> Record:
        network = self._converted()
        self._fit(*partnets.held_out(network, self.data, validation=VALIDATION, seed=self.seed))
        return self._judged(stn.freeze(network))

    def all(self) -> Record:
        self.task.train = self.data
        return self._judged(Tuner(self.task, self.seed, self.checkpoint).plain({}, "all"))

    lml_untuned, fifth_untuned = lml, fifth

    def _converted(self) -> nn.Module:
        torch.manual_seed(self.seed)
        network = self.task.network()
        return stn.convert(network, hypers(network), scale=self.task.scale, learn_scale=self.tuned)

    def _fit(self, model: nn.Module, chunks: partnets.Chunks) -> partnets.History:
        options = {"lml_every": max(1, self.task.steps // EVALUATIONS), "seed": self.seed}
        trainer = self.task.self_tuning(model, chunks, self.tuned, **options)
        return fit(trainer, self.task.steps, self.checkpoint)

    def _judged(self, model: nn.Module) -> Record:
        test = self.task.test
        return {"test": partnets.mean_loss(model, test), "test_accuracy": 100 * partnets.accuracy(model, test)}


@registered
class StnLml(Experiment):
    """STN on L_ML, against STN with a validation set of a fifth, and against no tuning."""

    name = "stn-lml"
    paper = "neither paper has it"
    datasets = ("digits", "documentation")

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        steps = QUICK_STEPS if quick else STEPS[dataset]
        return [
            {"dataset": dataset, "method": method, "seed": seed, "steps": steps} for seed in seeds for method in LABELS
        ]

    def train(self, setting: Record, checkpoint: Path) -> Record:
        make = digits_task if setting["dataset"] == "digits" else documentation_task
        return getattr(Unheld(make(setting["seed"], setting["steps"]), setting, checkpoint), setting["method"])()

    def table(self, found: pd.DataFrame) -> Table:
        rows = []
        for method, label in LABELS.items():
            mine = select(found, method=method)
            lml = text(_last(mine), 0) if method.startswith("lml") else ""
            rows.append([label, text(mine.test, 3), text(mine.test_accuracy), lml])
        return ["", "test loss", "test accuracy, %", "L_ML at the end, nats"], rows

    def draw(self, found: pd.DataFrame) -> Figure:
        """Plot L_ML over the steps."""
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        colours = {"lml": "tab:blue", "lml_untuned": "tab:gray"}
        for method, colour in colours.items():
            for i, lml in enumerate(select(found, method=method).lml):
                axes.plot(lml["step"], lml["lml"], color=colour, label=LABELS[method] if i == 0 else None)
        axes.set(xlabel="step", ylabel="L_ML [nats]")
        axes.legend(fontsize="small")
        return figure

    def claims(self, found: pd.DataFrame) -> list[Claim]:
        ours = select(found, method="lml")
        untuned = select(found, method="lml_untuned")
        claims = [lower("-L_ML is lower where λ is tuned", -_last(ours), -_last(untuned), digits=0)]
        for method in ("lml_untuned", "fifth", "fifth_untuned", "all"):
            claim = f"STN on L_ML: test loss below that of {LABELS[method]}"
            claims.append(lower(claim, ours.test, select(found, method=method).test))
        return claims


def _last(found: pd.DataFrame) -> pd.Series:
    return found.lml.map(lambda lml: lml["lml"][-1])
