"""Fig. 2a: L_ML finds the number of informative inputs; so does post-hoc Laplace, and the training loss does not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from torch import Tensor, nn

import partnets
from benchmarks.paper.experiment import Claim, Experiment, Record, error_bars, markdown, mean, select, text, values
from benchmarks.paper.runs import fit
from partnets import baselines, models, optim
from partnets.data import input_selection

FEATURES, INFORMATIVE = 30, 15
INPUTS = (1, 5, 10, 13, 15, 17, 20, 25, 30)
QUICK_INPUTS = (1, 5, 15, 30)
CHUNKS = 8
# Appendix I.5; Section 5 has 1000.
EXAMPLES = 3000
# The paper's 1000 leave the order of neighbouring models to chance.
TEST_EXAMPLES = 10_000
# Of the paper's 10 000 steps, which stop early: L_ML is highest before.
STEPS, QUICK_STEPS = 3000, 1000
LR, BATCH = 1e-3, 256
# Of the prior; a weight decay of 3e-4 (Appendix I.4) for what has seen all examples.
PRECISION = 3e-4 * EXAMPLES
EVALUATE_EVERY = 100


class FirstInputs(nn.Module):
    """Sets all but the first n features to 0."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.arange(FEATURES) < n).float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


def network(inputs: int) -> nn.Module:
    """An MLP with two hidden layers of 256 that sees the first inputs only."""
    return nn.Sequential(FirstInputs(inputs), models.MLP(FEATURES, classes=2))


class InputSelection(Experiment):
    """Nine networks that see more and more inputs; the first 15 are informative."""

    name = "input-selection"
    paper = "Fig. 2a"
    datasets = ("synthetic",)

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        return [
            {"inputs": inputs, "method": method, "steps": QUICK_STEPS if quick else STEPS, "seed": seed}
            for seed in seeds
            for inputs in (QUICK_INPUTS if quick else INPUTS)
            for method in (("partitioned",) if quick else ("partitioned", "laplace"))
        ]

    def train(self, setting: Record, checkpoint: Path) -> Record:
        data = input_selection(EXAMPLES, test=TEST_EXAMPLES, seed=setting["seed"])
        return getattr(self, setting["method"])(setting, data, checkpoint)

    def partitioned(self, setting: Record, data: partnets.data.Data, checkpoint: Path) -> Record:
        proportions = (1 / CHUNKS,) * CHUNKS
        model = partnets.partition(network(setting["inputs"]), proportions, seed=setting["seed"])
        chunks = partnets.chunk(data.train, proportions, seed=setting["seed"])
        decay = optim.decays(PRECISION, chunks.sizes)
        trainer = partnets.Trainer(
            model,
            chunks,
            optimizer=optim.Adam(model, lr=LR, weight_decay=decay),
            batch_size=BATCH,
            lml_every=EVALUATE_EVERY,
            keep_best=True,
            seed=setting["seed"],
        )
        fit(trainer, setting["steps"], checkpoint)
        at_the_end = partnets.mean_loss(model, data.train)
        lml = trainer.restore_best()
        return {**measured(model, data), "last_train_loss": at_the_end, "evidence": lml, "stopped": trainer.best.step}

    def laplace(self, setting: Record, data: partnets.data.Data, checkpoint: Path) -> Record:
        """Standard training, and the marginal likelihood around its weights, wherever that is highest."""
        model = network(setting["inputs"])
        whole, chunks = baselines.whole(model, data.train, seed=setting["seed"])
        optimizer = optim.Adam(whole, lr=LR, weight_decay=optim.decays(PRECISION, chunks.sizes))
        trainer = partnets.Trainer(whole, chunks, optimizer=optimizer, batch_size=BATCH, seed=setting["seed"])
        best: Record = {"evidence": -float("inf")}
        for step in range(EVALUATE_EVERY, setting["steps"] + 1, 5 * EVALUATE_EVERY):
            trainer.fit(step - trainer.steps)
            evidence = baselines.laplace(model, data.train)
            if evidence > best["evidence"]:
                best = {**measured(model, data), "evidence": evidence, "stopped": step}
        return {**best, "last_train_loss": partnets.mean_loss(model, data.train)}

    def table(self, records: Sequence[Record]) -> str:
        """Means over the seeds, at the highest L_ML."""
        header = ["inputs", "L_ML, nats", "test log-likelihood", "test accuracy, %", "training loss at the end"]
        laplace = bool(select(records, method="laplace"))
        rows = []
        for inputs in sorted({record["inputs"] for record in records}):
            ours = select(records, method="partitioned", inputs=inputs)
            rows.append(
                [
                    str(inputs),
                    text(values(ours, "evidence"), 0),
                    text([-loss for loss in values(ours, "test_loss")], 4),
                    text(values(ours, "test_accuracy")),
                    text(values(ours, "last_train_loss"), 4),
                ]
            )
            if laplace:
                theirs = select(records, method="laplace", inputs=inputs)
                rows[-1] += [
                    text(values(theirs, "evidence"), 0),
                    text([-loss for loss in values(theirs, "test_loss")], 4),
                ]
        return markdown(header + ["Laplace, nats", "its test log-likelihood"] * laplace, rows)

    def draw(self, records: Sequence[Record]) -> Figure:
        """Evidence, log-likelihoods and accuracies over the number of inputs, as the paper."""
        methods = [method for method in ("partitioned", "laplace") if select(records, method=method)]
        figure = Figure(figsize=(5.5 * len(methods), 7), layout="constrained")
        panels = figure.subplots(3, len(methods), squeeze=False, sharex=True)
        for (top, middle, bottom), method in zip(panels.T, methods, strict=True):
            top.set_title("partitioned" if method == "partitioned" else "post-hoc diagonal Laplace")
            curves = [
                (top, "evidence", "L_ML" if method == "partitioned" else "log marginal likelihood", 1),
                (middle, "test_loss", "test", -1),
                (middle, "train_loss", "training", -1),
                (middle, "last_train_loss", "training, at the end", -1),
                (bottom, "test_accuracy", "test", 1),
                (bottom, "train_accuracy", "training", 1),
            ]
            for axes, name, label, sign in curves:
                points = by_inputs(records, method, name)
                heights = [sign * mean(point) for point in points.values()]
                errors = error_bars(points.values())
                axes.errorbar(list(points), heights, errors, label=label, marker=".", linewidth=1)
            top.set(ylabel="nats")
            middle.set(ylabel="log-likelihood an example")
            bottom.set(ylabel="accuracy [%]", xlabel="inputs")
            for axes in (top, middle, bottom):
                axes.axvline(INFORMATIVE, color="grey", linewidth=0.5)
                axes.legend(fontsize="small")
        return figure

    def claims(self, records: Sequence[Record]) -> list[Claim]:
        evidence = {k: mean(v) for k, v in by_inputs(records, "partitioned", "evidence").items()}
        test = {k: -mean(v) for k, v in by_inputs(records, "partitioned", "test_loss").items()}
        training = {k: mean(v) for k, v in by_inputs(records, "partitioned", "last_train_loss").items()}
        best = max(evidence, key=evidence.get)
        inputs = list(evidence)
        below = [evidence[k] for k in inputs if k <= INFORMATIVE]
        above = [evidence[k] for k in inputs if k >= INFORMATIVE]
        late = [training[k] for k in inputs if k >= INFORMATIVE]
        correlation = float(spearmanr(list(evidence.values()), list(test.values())).statistic)
        show_training = ", ".join(f"{k}: {training[k]:.4f}" for k in inputs if k >= INFORMATIVE)
        show = ", ".join(f"{k}: {value:.0f}" for k, value in evidence.items())
        return [
            Claim(f"L_ML is highest at {INFORMATIVE} inputs", show, best == INFORMATIVE),
            Claim("it falls on both sides", show, below == sorted(below) and above == sorted(above, reverse=True)),
            Claim("it ranks networks as their test log-likelihood", f"Spearman {correlation:.2f}", correlation >= 0.9),
            Claim(f"the training loss is lowest at {inputs[-1]}", show_training, min(late) == late[-1]),
            Claim(
                f"and falls with each of them from {INFORMATIVE} on", show_training, late == sorted(late, reverse=True)
            ),
        ]


def measured(model: nn.Module, data: partnets.data.Data) -> Record:
    """Mean losses in nats and accuracies in percent on training and test data."""
    return {
        "train_loss": partnets.mean_loss(model, data.train, F.cross_entropy),
        "test_loss": partnets.mean_loss(model, data.test, F.cross_entropy),
        "train_accuracy": 100 * partnets.accuracy(model, data.train),
        "test_accuracy": 100 * partnets.accuracy(model, data.test),
    }


def by_inputs(records: Sequence[Record], method: str, name: str) -> dict[int, list[float]]:
    """For each number of inputs, one number of each training."""
    chosen = select(records, method=method)
    return {
        inputs: values(select(chosen, inputs=inputs), name)
        for inputs in sorted({record["inputs"] for record in chosen})
    }
