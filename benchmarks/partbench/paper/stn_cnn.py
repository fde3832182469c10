"""Self-tuning networks on images: a small convolutional network on rotated digits, AlexNet on CIFAR-10."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import TensorDataset

from partbench.datasets import load, subset
from partbench.paper.experiment import registered
from partbench.paper.tuning import Task, Tuning
from partnets import data, hyper

RATES = hyper.interval(0.0, 0.75)
# All images are rotated by up to this many degrees.
TURNED = 45.0


class DigitsNetwork(nn.Module):
    """A network of two convolutions and two linear layers, with eleven regularisation hyperparameters."""

    def __init__(self) -> None:
        super().__init__()
        self.colours = hyper.InTraining(hyper.ColourJitter(brightness=0.1, contrast=0.1, saturation=None, hue=None))
        self.rotation = hyper.InTraining(rotation(5.0))
        self.cutout = hyper.Cutout(1.2, 1.2, most_holes=3.0, most_length=5.0)
        self.noise = hyper.InputNoise(0.05, range=hyper.interval(0.0, 0.5))
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.linear1, self.linear2 = nn.Linear(32 * 16, 64), nn.Linear(64, 10)
        self.drop0, self.drop1, self.drop2, self.drop3 = (hyper.Dropout(0.05, range=RATES) for _ in range(4))
        self.decay = hyper.WeightDecay(
            [self.conv1, self.conv2, self.linear1, self.linear2], 1e-5, range=hyper.logarithmic(1e-6, 1e-1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop0(self.noise(self.cutout(self.rotation(self.colours(x)))))
        x = self.drop1(self.conv1(x).relu())
        x = nn.functional.max_pool2d(self.conv2(x).relu(), 2)
        x = self.drop2(x).flatten(1)
        x = self.drop3(self.linear1(x).relu())
        return self.decay(self.linear2(x))


def rotation(degrees: float) -> hyper.Affine:
    """Return random rotations by up to this many degrees, without other transformations."""
    others = ("translate_x", "translate_y", "scale", "stretch", "shear")
    return hyper.Affine(rotation=degrees, **dict.fromkeys(others))


def digits_task(seed: int, steps: int = 3000, examples: int = 300) -> Task:
    """Return a task with `examples` training and as many validation images, all rotated by up to 45 degrees."""
    found = data.digits(8, test=1797 - 2 * examples, seed=seed)
    generator, turns = torch.Generator().manual_seed(seed), rotation(TURNED)
    (x, y), test = (
        (turns.transform(x, 2 * torch.rand(len(x), 1, generator=generator) - 1).detach(), y)
        for x, y in (found.train, found.test)
    )
    mean, std = x[:examples].mean(), x[:examples].std()
    x, test = (x - mean) / std, ((test[0] - mean) / std, test[1])
    return Task(
        network=DigitsNetwork,
        train=TensorDataset(x[:examples], y[:examples]),
        validation=TensorDataset(x[examples:], y[examples:]),
        test=TensorDataset(*test),
        space={
            **{f"drop{i}.rate": (0.0, 0.7, False) for i in range(4)},
            "cutout.holes": (0.01, 2.9, False),
            "cutout.length": (0.01, 4.9, False),
            "noise.std": (0.01, 0.45, False),
            "colours.brightness": (0.01, 0.5, False),
            "colours.contrast": (0.01, 0.5, False),
            "rotation.rotation": (0.5, 60.0, False),
            "decay.decay": (1e-6, 1e-1, True),
        },
        steps=steps,
        batch_size=64,
        lr=3e-3,
        hyper_lr=1e-2,
        hyper_after=steps // 10,
    )


class AlexNet(nn.Module):
    """The published network for images of 32x32, with its fifteen hyperparameters (MacKay et al. 2019).

    Five 3x3 convolutions of 64 (stride 2), 192, 384, 256 and 256 channels, and linear layers of 4096, 4096 and 10:
    23.3 million parameters.

    Args:
        width: the divisor of the channels and features.
    """

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        start = 0.05
        self.colours = hyper.InTraining(hyper.ColourJitter(brightness=0.05, contrast=0.05, saturation=0.05, hue=3.0))
        self.cutout = hyper.Cutout(1.2, 4.0, most_holes=4.0, most_length=24.0)
        self.noise = hyper.InputNoise(0.05, range=hyper.interval(0.0, 0.3))
        self.drop_input = hyper.Dropout(start)
        channels = [3, *(size // width for size in (64, 192, 384, 256, 256))]
        last, features = 4 * channels[-1], 4096 // width
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=2 if i == 0 else 1, padding=1)
            for i, (before, after) in enumerate(pairwise(channels))
        )
        self.drops = nn.ModuleList(hyper.Dropout(start) for _ in self.convolutions)
        self.linear1, self.linear2 = nn.Linear(last, features), nn.Linear(features, features)
        self.linear3 = nn.Linear(features, 10)
        self.drop1, self.drop2 = hyper.Dropout(start), hyper.Dropout(start)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop_input(self.noise(self.cutout(self.colours(x))))
        for i, (convolution, drop) in enumerate(zip(self.convolutions, self.drops, strict=True)):
            x = convolution(x).relu()
            if i in (0, 1, 4):
                x = nn.functional.max_pool2d(x, 2)
            x = drop(x)
        x = self.drop1(self.linear1(x.flatten(1)).relu())
        return self.linear3(self.drop2(self.linear2(x).relu()))


def cifar10_task(seed: int, steps: int, examples: int = 50_000, width: int = 1) -> Task:
    """Return a task on `examples` CIFAR-10 training images, a fifth for validation."""
    found = subset(load("cifar10", seed=seed), examples, seed)
    (x, y), test = ((images.float() / 255, labels) for images, labels in (found.train, found.test))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    held = len(x) // 5
    rates = [*(f"drops.{i}.rate" for i in range(5)), "drop_input.rate", "drop1.rate", "drop2.rate"]
    return Task(
        network=partial(AlexNet, width),
        train=TensorDataset(x[order[held:]], y[order[held:]]),
        validation=TensorDataset(x[order[:held]], y[order[:held]]),
        test=TensorDataset(*test),
        space={
            **dict.fromkeys(rates, (0.0, 0.85, False)),
            "noise.std": (0.01, 0.29, False),
            "colours.brightness": (0.01, 0.5, False),
            "colours.contrast": (0.01, 0.5, False),
            "colours.saturation": (0.01, 0.5, False),
            "colours.hue": (1.0, 90.0, False),
            "cutout.holes": (0.01, 3.9, False),
            "cutout.length": (0.1, 23.0, False),
        },
        steps=steps,
        batch_size=128,
        lr=1e-3,
        hyper_lr=3e-3,
        hyper_after=min(5 * 313, steps // 10),  # five epochs
    )


@registered
class StnCnn(Tuning):
    """Convolutional networks, with dropout rates, augmentation, Cutout and weight decay."""

    name = "stn-cnn"
    paper = "the talk's CNN experiment"
    datasets = ("digits", "cifar10", "cifar10-cpu")
    steps = {"digits": 3000, "cifar10": 60_000, "cifar10-cpu": 1200}  # noqa: RUF012

    def task(self, dataset, seed, steps):
        if dataset == "cifar10-cpu":  # a third of the width
            return cifar10_task(seed, steps, examples=5000, width=3)
        return (digits_task if dataset == "digits" else cifar10_task)(seed, steps)
