"""Table 3: the first two stages of a Wide ResNet as hyperparameters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import nn

import partnets
from partbench import models
from partbench.datasets import load
from partbench.paper.experiment import Claim, Experiment, Record, Table, at_least, registered, select, text
from partbench.paper.runs import fit
from partnets import hyper, optim
from partnets.data import Normalise, ToFloat

# Chunks: nearly all data are unseen by some subnetwork and train ψ; the alternative is the usual validation set.
PROPORTIONS = {"partitioned": (0.1, 0.8, 0.1), "validation": (0.9, 0.1)}
LABELS = {"partitioned": "partitioned", "validation": "validation-set optimisation"}
# The least effect, in points of accuracy.
MARGIN = 5.0
# depth, width, steps, batch. Wide ResNet-20's width is not in the paper; 5 here. Digits are 16x16 and few.
SIZES = {
    "digits": (8, 1, 1200, 64),
    "mnist": (8, 1, 10000, 250),
    "cifar10": (20, 5, 40000, 250),
    "tiny-imagenet": (20, 5, 80000, 250),
}
QUICK_STEPS = 100
LR = 1e-3


def group_norm(channels: int) -> nn.Module:
    """Return a group norm, because running statistics would mix all chunks."""
    return nn.GroupNorm(2, channels)


@registered
class Extractor(Experiment):
    """A feature extractor as ψ: a convolution and two stages; the weights are the third stage and the classifier."""

    name = "extractor"
    paper = "Table 3"

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        depth, width, steps, batch = SIZES[dataset]
        sizes = {"depth": depth, "width": width, "steps": QUICK_STEPS if quick else steps, "batch": batch}
        return [{"dataset": dataset, "method": m, **sizes, "seed": seed} for seed in seeds for m in PROPORTIONS]

    def train(self, setting: Record, checkpoint: Path) -> Record:
        data, seed = load(setting["dataset"], seed=setting["seed"]), setting["seed"]
        channels = data.train[0].shape[1]
        whole = models.WideResNet(setting["depth"], setting["width"], channels, data.classes, norm=group_norm)
        features = hyper.Submodule(nn.Sequential(whole.stem, whole.stage1, whole.stage2))
        pooled = whole.stage3, whole.norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        head = nn.Sequential(*pooled, whole.classifier)
        model = nn.Sequential(ToFloat(), Normalise(data.mean, data.std), features, head)
        proportions, options = PROPORTIONS[setting["method"]], {}
        if setting["method"] == "partitioned":
            partnets.partition(model, proportions, seed=seed)
            chunks = partnets.chunk(data.train, proportions, seed=seed)
        else:
            model, chunks = partnets.held_out(model, data.train, validation=proportions[1], seed=seed)
            options = {"sampling": (1, 0)}
        options |= {"hyper_optimizer": torch.optim.Adam(features.parameters(), lr=LR), "batch_size": setting["batch"]}
        optimizer = optim.Adam(model, lr=LR)
        fit(
            partnets.Trainer(model, chunks, hyper=features, optimizer=optimizer, seed=seed, **options),
            setting["steps"],
            checkpoint,
        )
        return {
            "accuracy": 100 * partnets.accuracy(model, data.test),
            "train_accuracy": 100 * partnets.accuracy(model, data.train),
            "lml": partnets.lml(model, chunks),
            "hyperparameters": sum(parameter.numel() for parameter in features.parameters()),
        }

    def table(self, found: pd.DataFrame) -> Table:
        rows = []
        for method, proportions in PROPORTIONS.items():
            mine = select(found, method=method)
            size = f"{mine.hyperparameters.iloc[0]:,}".replace(",", " ")
            rows.append([LABELS[method], ", ".join(map(str, proportions)), text(mine.accuracy), size])
        return ["method", "chunks", "test accuracy, %", "numbers in ψ"], rows

    def draw(self, found: pd.DataFrame) -> Figure:
        figure = Figure(figsize=(4, 4), layout="constrained")
        axes = figure.subplots()
        for position, (method, label) in enumerate(LABELS.items()):
            heights = select(found, method=method).accuracy
            axes.bar(position, heights.mean(), color=f"C{position}", alpha=0.6, label=label)
            axes.plot([position] * len(heights), heights, "k.")
        axes.set(ylabel="test accuracy [%]", xticks=[])
        axes.legend(loc="lower center")
        return figure

    def claims(self, found: pd.DataFrame) -> list[Claim]:
        both = [select(found, method=method).accuracy for method in PROPORTIONS]
        return [at_least(f"partitioned ≥ validation-set optimisation by {MARGIN:.0f} points", *both, MARGIN)]
