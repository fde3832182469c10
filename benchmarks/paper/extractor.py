"""Table 3: the first two stages of a Wide ResNet as hyperparameters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

import partnets
from benchmarks.paper.experiment import Claim, Experiment, Record, markdown, mean, select, text, values
from benchmarks.paper.runs import fit
from partnets import baselines, hyper, models, optim
from partnets.data import Normalise, ToFloat, load

# Chunks: nearly all data are unseen by some subnetwork and train ψ; against the usual validation set.
PROPORTIONS = {"partitioned": (0.1, 0.8, 0.1), "validation": (0.9, 0.1)}
LABELS = {"partitioned": "partitioned", "validation": "validation-set optimisation"}
# By how many points the paper's effect must show.
MARGIN = 5.0


def group_norm(channels: int) -> nn.Module:
    """Running statistics would be those of all chunks."""
    return nn.GroupNorm(2, channels)


# depth, width, steps, batch. Wide ResNet-20's width is not in the paper; 5 here. Digits are 16x16 and few.
SIZES = {
    "digits": (8, 1, 1200, 64),
    "mnist": (8, 1, 10000, 250),
    "cifar10": (20, 5, 40000, 250),
    "tiny-imagenet": (20, 5, 80000, 250),
}
QUICK_STEPS = 100
LR = 1e-3


class Extractor(Experiment):
    """ψ is a convolution and two stages; the weights are the third stage and the classifier."""

    name = "extractor"
    paper = "Table 3"

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        depth, width, steps, batch = SIZES[dataset]
        steps = QUICK_STEPS if quick else steps
        return [
            {
                "dataset": dataset,
                "method": m,
                "depth": depth,
                "width": width,
                "steps": steps,
                "batch": batch,
                "seed": seed,
            }
            for seed in seeds
            for m in PROPORTIONS
        ]

    def train(self, setting: Record, checkpoint: Path) -> Record:
        data = load(setting["dataset"], seed=setting["seed"])
        channels = data.train[0].shape[1]
        whole = models.WideResNet(setting["depth"], setting["width"], channels, data.classes, norm=group_norm)
        features = hyper.Submodule(nn.Sequential(whole.stem, whole.stage1, whole.stage2))
        head = nn.Sequential(
            whole.stage3, whole.norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), whole.classifier
        )
        model = nn.Sequential(ToFloat(), Normalise(data.mean, data.std), features, head)
        proportions, sampling = PROPORTIONS[setting["method"]], None
        if setting["method"] == "partitioned":
            partnets.partition(model, proportions, seed=setting["seed"])
            chunks = partnets.chunk(data.train, proportions, seed=setting["seed"])
        else:
            model, chunks = baselines.held_out(model, data.train, validation=proportions[1], seed=setting["seed"])
            sampling = (1, 0)
        trainer = partnets.Trainer(
            model,
            chunks,
            hyper=features,
            optimizer=optim.Adam(model, lr=LR),
            hyper_optimizer=torch.optim.Adam(features.parameters(), lr=LR),
            batch_size=setting["batch"],
            sampling=sampling,
            seed=setting["seed"],
        )
        fit(trainer, setting["steps"], checkpoint)
        return {
            "accuracy": 100 * partnets.accuracy(model, data.test),
            "train_accuracy": 100 * partnets.accuracy(model, data.train),
            "lml": partnets.lml(model, chunks),
            "hyperparameters": sum(parameter.numel() for parameter in features.parameters()),
        }

    def table(self, records: Sequence[Record]) -> str:
        rows = [
            [
                LABELS[method],
                ", ".join(map(str, proportions)),
                text(values(select(records, method=method), "accuracy")),
                f"{select(records, method=method)[0]['hyperparameters']:,}".replace(",", " "),
            ]
            for method, proportions in PROPORTIONS.items()
        ]
        return markdown(["method", "chunks", "test accuracy, %", "numbers in ψ"], rows)

    def draw(self, records: Sequence[Record]) -> Figure:
        figure = Figure(figsize=(4, 4), layout="constrained")
        axes = figure.subplots()
        for position, (method, label) in enumerate(LABELS.items()):
            heights = values(select(records, method=method), "accuracy")
            axes.bar(position, mean(heights), color=f"C{position}", alpha=0.6, label=label)
            axes.plot([position] * len(heights), heights, "k.")
        axes.set(ylabel="test accuracy [%]", xticks=[])
        axes.legend(loc="lower center")
        return figure

    def claims(self, records: Sequence[Record]) -> list[Claim]:
        ours, theirs = (values(select(records, method=method), "accuracy") for method in PROPORTIONS)
        return [
            Claim(
                f"partitioned ≥ validation-set optimisation by {MARGIN:.0f} points",
                f"{text(ours)} and {text(theirs)} %",
                mean(ours) >= mean(theirs) + MARGIN,
            )
        ]
