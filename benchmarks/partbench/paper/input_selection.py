"""Fig. 2a: L_ML finds the number of informative inputs, as does post-hoc Laplace but not the training loss."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from torch import Tensor, nn

import partnets
from partbench import baselines, models
from partbench.paper.experiment import Claim, Experiment, Record, Table, curve, registered, select, text
from partbench.paper.methods import partition
from partbench.paper.runs import fit
from partbench.paper.schemes import SCHEMES
from partbench.paper.toy import input_selection
from partnets import optim

FEATURES, INFORMATIVE = 30, 15
INPUTS = (1, 5, 10, 13, 15, 17, 20, 25, 30)
QUICK_INPUTS = (1, 5, 15, 30)
CHUNKS = 8
# From Appendix I.5; Section 5 has 1000.
EXAMPLES = 3000
# With the paper's 1000, the order of neighbouring models depends on chance.
TEST_EXAMPLES = 10_000
# Instead of the paper's 10 000 with early stopping: L_ML is highest before.
STEPS, QUICK_STEPS = 3000, 1000
LR, BATCH = 1e-3, 256
# The prior's precision: a weight decay of 3e-4 (Appendix I.4) for weights that have seen all examples.
PRECISION = 3e-4 * EXAMPLES
EVALUATE_EVERY = 100
# The partitioned methods and their schemes; Appendix C has all but the first.
PARTITIONED = {"partitioned": "weight", "node": "node", "nested": "nested", "faster": "nested", "weights": "weights"}
LABELS = {**SCHEMES, "faster": "nested, biases ten times as fast"}
FASTER = 10


class FirstInputs(nn.Module):
    """A mask that sets all but the first n features to 0."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.arange(FEATURES) < n).float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


def network(inputs: int) -> nn.Module:
    """Build an MLP with two hidden layers of 256 that sees only the first inputs."""
    return nn.Sequential(FirstInputs(inputs), models.MLP(FEATURES, classes=2))


@registered
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
            for method in (("partitioned",) if quick else (*PARTITIONED, "laplace"))
        ]

    def train(self, setting: Record, checkpoint: Path) -> Record:
        data = input_selection(EXAMPLES, test=TEST_EXAMPLES, seed=setting["seed"])
        train = self.laplace if setting["method"] == "laplace" else self.partitioned
        return train(setting, data, checkpoint)

    def partitioned(self, setting: Record, data: partnets.data.Data, checkpoint: Path) -> Record:
        proportions, model = (1 / CHUNKS,) * CHUNKS, network(setting["inputs"])
        partition(model, proportions, data, PARTITIONED[setting["method"]], setting["seed"])
        chunks = partnets.chunk(data.train, proportions, seed=setting["seed"])
        decay = optim.decays(PRECISION, chunks.sizes)
        biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
        groups = [{"params": biases, "lr": FASTER * LR}] if setting["method"] == "faster" else []
        trainer = partnets.Trainer(
            model,
            chunks,
            optimizer=optim.Adam(model, lr=LR, weight_decay=decay, groups=groups),
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
        """Train without partitions; return results at the highest marginal likelihood of a Laplace approximation."""
        model = network(setting["inputs"])
        whole, chunks = partnets.single_chunk(model, data.train, seed=setting["seed"])
        optimizer = optim.Adam(whole, lr=LR, weight_decay=optim.decays(PRECISION, chunks.sizes))
        trainer = partnets.Trainer(whole, chunks, optimizer=optimizer, batch_size=BATCH, seed=setting["seed"])
        best: Record = {"evidence": -float("inf")}
        for step in range(EVALUATE_EVERY, setting["steps"] + 1, 5 * EVALUATE_EVERY):
            trainer.fit(step - trainer.steps)
            evidence = baselines.laplace(model, data.train)
            if evidence > best["evidence"]:
                best = {**measured(model, data), "evidence": evidence, "stopped": step}
        return {**best, "last_train_loss": partnets.mean_loss(model, data.train)}

    def table(self, found: pd.DataFrame) -> Table:
        """Return a row for each number of inputs, with means over the seeds.

        L_ML, test log-likelihood and accuracy are from the step with the highest L_ML, or for Laplace, with the highest
        marginal likelihood. The training loss is from the last step.
        """
        head = ["inputs", "L_ML, nats", "test log-likelihood", "test accuracy, %", "training loss at the end"]
        others = [method for method in (*tuple(PARTITIONED)[1:], "laplace") if (found.method == method).any()]
        for method in others:
            name = f"{LABELS[method]}: L_ML" if method in PARTITIONED else "Laplace, nats"
            head += [name, "its test log-likelihood"]
        rows = []
        for inputs in sorted(found.inputs.unique()):
            ours, *theirs = (select(found, method=method, inputs=inputs) for method in ("partitioned", *others))
            row = [str(inputs), text(ours.evidence, 0), text(-ours.test_loss, 4), text(ours.test_accuracy)]
            row.append(text(ours.last_train_loss, 4))
            for their in theirs:
                row += [text(their.evidence, 0), text(-their.test_loss, 4)]
            rows.append(row)
        return head, rows

    def draw(self, found: pd.DataFrame) -> Figure:
        """Plot evidence, log-likelihoods and accuracies over the number of inputs, as in the paper."""
        methods = [method for method in ("partitioned", "laplace") if (found.method == method).any()]
        figure = Figure(figsize=(5.5 * len(methods), 7), layout="constrained")
        panels = figure.subplots(3, len(methods), squeeze=False, sharex=True)
        for (top, middle, bottom), method in zip(panels.T, methods, strict=True):
            mine, ours = select(found, method=method), method == "partitioned"
            curve(top, mine.inputs, mine.evidence, "L_ML" if ours else "log marginal likelihood")
            curve(middle, mine.inputs, -mine.test_loss, "test")
            curve(middle, mine.inputs, -mine.train_loss, "training")
            curve(middle, mine.inputs, -mine.last_train_loss, "training, at the end")
            curve(bottom, mine.inputs, mine.test_accuracy, "test")
            curve(bottom, mine.inputs, mine.train_accuracy, "training")
            top.set(ylabel="nats", title="partitioned" if ours else "post-hoc diagonal Laplace")
            middle.set(ylabel="log-likelihood an example")
            bottom.set(ylabel="accuracy [%]", xlabel="inputs")
            for axes in (top, middle, bottom):
                axes.axvline(INFORMATIVE, color="grey", linewidth=0.5)
                axes.legend(fontsize="small")
        return figure

    def claims(self, found: pd.DataFrame) -> list[Claim]:
        claims = []
        for method in PARTITIONED:
            if not (mine := select(found, method=method)).empty:
                claims += _of_evidence(mine, "" if method == "partitioned" else f"{LABELS[method]}: ")
        late = select(found, method="partitioned").groupby("inputs").last_train_loss.mean().loc[INFORMATIVE:]
        training = ", ".join(f"{inputs}: {loss:.4f}" for inputs, loss in late.items())
        every = f"the training loss falls with each number of inputs from {INFORMATIVE} on"
        return [
            *claims,
            Claim(f"the training loss is lowest at {late.index[-1]}", training, late.min() == late.iloc[-1]),
            Claim(every, training, late.is_monotonic_decreasing),
        ]


def _of_evidence(found: pd.DataFrame, label: str) -> list[Claim]:
    """Check the paper's claims about L_ML for one scheme."""
    means = found.groupby("inputs")[["evidence", "test_loss"]].mean()
    evidence = means.evidence
    against = [
        f"not from {a} to {b}: {before:.0f}, {after:.0f}"
        for (a, before), (b, after) in itertools.pairwise(evidence.items())
        if not (before <= after if b <= INFORMATIVE else before >= after)
    ]
    correlation = float(spearmanr(evidence, -means.test_loss).statistic)
    show = ", ".join(f"{inputs}: {value:.0f}" for inputs, value in evidence.items())
    return [
        Claim(f"{label}L_ML is highest at {INFORMATIVE} inputs", show, evidence.idxmax() == INFORMATIVE),
        Claim(f"{label}L_ML falls on both sides of {INFORMATIVE}", "; ".join(against) or "everywhere", not against),
        Claim(
            f"{label}L_ML ranks networks as test log-likelihood does", f"Spearman {correlation:.2f}", correlation >= 0.9
        ),
    ]


def measured(model: nn.Module, data: partnets.data.Data) -> Record:
    """Return mean losses in nats and accuracies in percent on training and test data."""
    return {
        "train_loss": partnets.mean_loss(model, data.train, F.cross_entropy),
        "test_loss": partnets.mean_loss(model, data.test, F.cross_entropy),
        "train_accuracy": 100 * partnets.accuracy(model, data.train),
        "test_accuracy": 100 * partnets.accuracy(model, data.test),
    }
