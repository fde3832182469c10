"""Tune a network's augmentation, dropout and weight decay on images, without a validation set.

Trains on scikit-learn's digits, once upright and once with every image rotated by an angle from U[-180, 180] degrees.
partnets.tune finds large rotations for the rotated digits, and hardly any for the upright ones. The table compares the
tuned networks with the same training untuned. The settings are the same for both data sets.

usage: python examples/digits.py [--seeds 0,1,2] [--steps 1200] [--out out/digits.png]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import nn

import partnets
from partnets import hyper
from partnets.data import Data, Normalise, digits

SIZE, BATCH, SHOWN = 16, 128, 12
ADAM = partial(torch.optim.Adam, lr=2e-3)


def network(data: Data) -> nn.Module:
    return nn.Sequential(
        Normalise(data.mean, data.std),
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.0),
        nn.Linear(32 * (SIZE // 4) ** 2, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@dataclass
class Run:
    """The tuning result on one data set, with the test accuracies of the tuned and the untuned network."""

    result: partnets.Tuned
    tuned: float
    untuned: float
    image: torch.Tensor


def untuned(model: nn.Module, data: Data, steps: int) -> nn.Module:
    """Train the model without regularisation and augmentation, otherwise as tune does."""
    optimizer = ADAM(model.parameters())
    x, y = data.train
    for _ in range(steps):
        batch = torch.randint(len(x), (BATCH,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return model


def run(rotated: bool, steps: int, seed: int) -> Run:
    data = digits(SIZE, seed=seed)
    data = data.rotated(seed) if rotated else data
    torch.manual_seed(seed)
    model = network(data)
    tuned = [hyper.Affine(), "dropout", "weight_decay"]
    result = partnets.tune(model, data, tuned, steps=steps, batch_size=BATCH, optimizer=ADAM, seed=seed)
    accuracy = partnets.accuracy(result.model, data.test)
    return Run(result, accuracy, partnets.accuracy(untuned(model, data, steps), data.test), data.train[0][:1])


def print_table(runs: dict[str, dict[int, Run]]) -> None:
    """Print a row for each seed, and the means over several seeds."""
    columns = ("rotation ±°", "dropout", "L_ML nats", "tuned %", "untuned %", "gain")
    print(f"\n{'digits':8} {'seed':>4}", *(f"{column:>11}" for column in columns))
    for name, by_seed in runs.items():
        rows: dict[str, tuple[float, ...]] = {
            str(seed): (
                one.result.values["rotation"],
                one.result.values["dropout"],
                one.result.lml,
                100 * one.tuned,
                100 * one.untuned,
                100 * (one.tuned - one.untuned),
            )
            for seed, one in by_seed.items()
        }
        if len(rows) > 1:
            rows["mean"] = tuple(sum(column) / len(rows) for column in zip(*rows.values(), strict=True))
        for label, row in rows.items():
            print(f"{name:8} {label:>4}", *(f"{number:11.2f}" for number in row))


def draw(runs: dict[str, dict[int, Run]], path: Path) -> None:
    """Draw a row for each data set: L_ML of all trials, accuracies, and images from the chosen augmentation."""
    figure = Figure(figsize=(13, 3.4 * len(runs)), layout="constrained")
    bands = figure.subfigures(len(runs), 1, squeeze=False).flat
    for band, (name, by_seed) in zip(bands, runs.items(), strict=True):
        band.suptitle(f"{name} digits", fontweight="bold")
        curves, bars = band.subfigures(1, 2, width_ratios=(1, 1.6))
        one = next(iter(by_seed.values()))
        axes = curves.subplots()
        tenths = [i / 10 for i in range(1, 11)]
        for i, trial in enumerate(one.result.history):
            axes.plot(tenths, [-nats for nats in trial.nats], linewidth=1, color="C7", label=None if i else "tried")
        axes.plot(tenths, [-nats for nats in one.result.confirmed.nats], color="C0", label="chosen")
        axes.set(title="L_ML [nats]", xlabel="share of the steps")
        axes.legend(fontsize="small")
        top, bottom = bars.subfigures(2, 1)
        heights = [
            100 * sum(getattr(each, key) for each in by_seed.values()) / len(by_seed) for key in ("untuned", "tuned")
        ]
        axes = top.subplots()
        axes.barh(["untuned", "tuned"], heights, color=["C7", "C0"])
        for i, height in enumerate(heights):
            axes.text(2, i, f"{height:.1f} %", va="center", color="white")
        axes.set(title="test accuracy", xlim=(0, 100))
        show_samples(bottom, one)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


@torch.no_grad()
def show_samples(figure, one: Run) -> None:
    """Show one training image and samples of it from the chosen augmentation in a row."""
    augmentation = hyper.Affine()
    names = augmentation.values().keys()
    hyper.assign(augmentation, {name: max(one.result.values[name], 1e-3) for name in names})
    samples = torch.cat([one.image, augmentation(one.image.expand(SHOWN - 1, -1, -1, -1))])
    for i, (axes, sample) in enumerate(zip(figure.subplots(1, SHOWN), samples, strict=True)):
        axes.imshow(sample[0], cmap="gray", vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[], title="image" if i == 0 else "chosen" if i == 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0", help="comma-separated, such as 0,1,2")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--out", type=Path, default=Path("out/digits.png"), help="the picture")
    arguments = parser.parse_args()
    runs: dict[str, dict[int, Run]] = {"rotated": {}, "upright": {}}
    for seed in map(int, arguments.seeds.split(",")):
        start = time.perf_counter()
        for name in runs:
            print(f"seed {seed}: tuning on {name} digits", flush=True)
            runs[name][seed] = run(name == "rotated", arguments.steps, seed)
            print(runs[name][seed].result.report(), flush=True)
        print(f"seed {seed}: {time.perf_counter() - start:.0f} s", flush=True)
    print_table(runs)
    draw(runs, arguments.out)
    print(f"\nThe picture is in {arguments.out}.")


if __name__ == "__main__":
    main()
