"""A network learns its own augmentation from images, without a validation set, and is trained with what was found.

Trains on scikit-learn's digits, once upright and once with every image rotated by an angle from U[-180, 180] degrees.
The widths of random affine transformations are hyperparameters, of two kinds. What the classes do not change with is
drawn always, and learned from how it changes predictions: rotations should grow on rotated digits, and shrink on
upright ones. What makes few images more is drawn in training alone, and learned by looking ahead. Then the same
network is trained from scratch, whole and on all images, with both. Nothing is tuned for either data set.

usage: python examples/digits.py [--seeds 0,1,2] [--steps 2400] [--out out/digits.png]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import partnets
from partnets import hyper
from partnets.data import Data, Normalise, digits

SIZE = 16
PROPORTIONS = (0.8, 0.1, 0.1)
# Few images in several augmented copies, for many steps: at equal cost, a quarter of the steps with 16 copies of each
# image ends before the network has converged.
SAMPLES, BATCH = 4, 32
# The rate of the weights falls on a cosine to a hundredth, that of the hyperparameters stays.
LR, HYPER_LR, LAST = 4e-3, 3e-2, 0.01
# The share of the steps in which hyperparameters learn, and after how many of them each time: a step that looks ahead
# takes as long as some of the weights'.
SEARCH, EVERY = 0.4, 2
# The same 0.12 in every generator's own units.
INITIAL = {"translate_x": 0.06, "translate_y": 0.06, "rotation": 7.0, "scale": 0.12, "stretch": 0.12, "shear": 0.12}
SHOWN = 12


def network(data: Data) -> nn.Module:
    return nn.Sequential(
        Normalise(data.mean, data.std),
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * (SIZE // 4) ** 2, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def falling(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=LAST * LR)


@dataclass
class Result:
    """One run: its history, test accuracies, and the augmentations that were learned.

    partitioned: of the network in which they were learned; retrained: of one that was trained with them from scratch;
    without: of one without any.
    """

    history: partnets.History
    partitioned: float
    retrained: float
    without: float
    augmentation: nn.Module
    images: Tensor

    @property
    def rotation(self) -> float:
        return self.augmentation[0].values()["rotation"]


def learn(data: Data, steps: int, seed: int) -> tuple[nn.Module, nn.Module, partnets.History]:
    """The main job: weights and augmentations together."""
    torch.manual_seed(seed)
    always, in_training = hyper.Affine(**INITIAL), hyper.InTraining(hyper.Affine(**INITIAL))
    augmentation = nn.Sequential(always, in_training)
    model = hyper.Averaged(augmentation, network(data), samples=SAMPLES)
    partnets.partition(model, PROPORTIONS, seed=seed)
    optimizer = partnets.optim.Adam(model, lr=LR)
    trainer = partnets.Trainer(
        model,
        partnets.chunk(data.train, PROPORTIONS, seed=seed),
        hyper=[always, in_training],
        optimizer=optimizer,
        hyper_optimizer=torch.optim.Adam(augmentation.parameters(), lr=HYPER_LR),
        scheduler=falling(optimizer, steps),
        batch_size=BATCH,
        hyper_every=EVERY,
        lml_every=80,
        seed=seed,
    )
    return model, augmentation, trainer.fit(steps)


def train(model: nn.Module, data: Data, steps: int, batch_size: int, seed: int) -> nn.Module:
    """An ordinary network in an ordinary loop: whole, and on all data."""
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=LR)
    scheduler = falling(optimizer, steps)
    x, y = data.train
    for _ in range(steps):
        batch = torch.randint(len(x), (batch_size,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        scheduler.step()
    return model


def run(rotated: bool, steps: int, seed: int) -> Result:
    data = digits(SIZE, seed=seed)
    data = data.rotated(seed) if rotated else data
    model, augmentation, history = learn(data, round(SEARCH * steps), seed)
    retrained = train(partnets.finalize(model, "retrain", seed=seed), data, steps, BATCH, seed)
    torch.manual_seed(seed)
    without = train(network(data), data, steps, BATCH * SAMPLES, seed)
    accuracies = (partnets.accuracy(each, data.test) for each in (model, retrained, without))
    return Result(history, *accuracies, augmentation, data.train[0])


def print_table(results: dict[str, dict[int, Result]]) -> None:
    """Means too, where there are several seeds. The gain is that of the retrained network over the one without."""
    columns = ("rotation ±°", "L_ML nats", "partitioned", "retrained", "without", "gain")
    print(f"\n{'digits':8} {'seed':>4}", *(f"{column:>11}" for column in columns))
    for name, by_seed in results.items():
        rows = {
            str(seed): (r.rotation, r.history.lml["lml"][-1], 100 * r.partitioned, 100 * r.retrained, 100 * r.without)
            for seed, r in by_seed.items()
        }
        if len(rows) > 1:
            rows["mean"] = tuple(sum(column) / len(rows) for column in zip(*rows.values(), strict=True))
        for label, row in rows.items():
            print(f"{name:8} {label:>4}", *(f"{number:11.1f}" for number in row), f"{row[3] - row[4]:+11.1f}")


def draw(results: dict[str, dict[int, Result]], path: Path) -> None:
    """A band for each data set: ψ over the steps, L_ML, test accuracies, and images from the learned augmentation."""
    figure = Figure(figsize=(15, 4.6 * len(results)), layout="constrained")
    bands = figure.subfigures(len(results), 1, squeeze=False)[:, 0]
    for band, (name, by_seed) in zip(bands, results.items(), strict=True):
        band.suptitle(f"{name} digits", fontweight="bold")
        plots, images = band.subfigures(2, 1, height_ratios=(3.2, 1))
        rotation, others, lml, bars = plots.subplots(1, 4)
        for seed, result in by_seed.items():
            steps = result.history.steps["step"]
            always, in_training = ({}, {})
            for key, value in result.history.values.items():
                *_, place, name = key.split(".")
                (always if place == "0" else in_training)[name] = value
            rotation.plot(steps, always["rotation"], label=f"seed {seed}")
            in_training.pop("rotation")
            for color, (key, value) in enumerate(in_training.items()):
                label = key if seed == next(iter(by_seed)) else None
                others.plot(steps, value, color=f"C{color}", label=label, linewidth=1)
            lml.plot(result.history.lml["step"], result.history.lml["lml"])
        rotation.set(title="rotation, half-width [degrees]", xlabel="step", ylim=(0, None))
        rotation.legend(fontsize="small")
        others.set(title="in training: half-widths [fractions, log-factors]", xlabel="step", ylim=(0, None))
        others.legend(fontsize="small")
        lml.set(title="L_ML [nats]", xlabel="step")
        for position, field in enumerate(("without", "partitioned", "retrained")):
            heights = [100 * getattr(result, field) for result in by_seed.values()]
            bars.bar(position, sum(heights) / len(heights), color=f"C{position}", alpha=0.6)
            bars.plot([position] * len(heights), heights, "k.", markersize=4)
            bars.text(position, 2, f"{field}\n{sum(heights) / len(heights):.1f} %", ha="center", fontsize="small")
        bars.set(title="test accuracy [%]", xticks=[], ylim=(0, 100))
        show_samples(images, next(iter(by_seed.values())))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


@torch.no_grad()
def show_samples(figure, result: Result) -> None:
    """A row: one training image, and draws of it from the learned augmentation."""
    image = result.images[:1]
    samples = torch.cat([image, result.augmentation(image.expand(SHOWN - 1, -1, -1, -1))])
    for i, (axes, sample) in enumerate(zip(figure.subplots(1, SHOWN), samples, strict=True)):
        axes.imshow(sample[0], cmap="gray", vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[], title="image" if i == 0 else "learned" if i == 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0", help="comma-separated, as in 0,1,2")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--out", type=Path, default=Path("out/digits.png"), help="the picture")
    arguments = parser.parse_args()
    results: dict[str, dict[int, Result]] = {"rotated": {}, "upright": {}}
    for seed in map(int, arguments.seeds.split(",")):
        start = time.perf_counter()
        for name in results:
            print(f"seed {seed}: training on {name} digits", flush=True)
            results[name][seed] = run(name == "rotated", arguments.steps, seed)
        print(f"seed {seed}: {time.perf_counter() - start:.0f} s", flush=True)
    print_table(results)
    draw(results, arguments.out)
    print(f"\nThe picture is in {arguments.out}.")


if __name__ == "__main__":
    main()
