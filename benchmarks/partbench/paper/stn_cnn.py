"""Self-tuning networks on images: a small convolutional network on rotated digits, AlexNet on CIFAR-10."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from partbench.paper.experiment import registered
from partbench.paper.tuning import Task, Tuning
from partnets import data, hyper

RATES = hyper.interval(0.0, 0.75)
# Degrees up to which all images are turned.
TURNED = 45.0


class DigitsNetwork(nn.Module):
    """Two convolutions and two linear layers, with eleven hyperparameters of regularisation."""

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
    """Random rotations alone, up to so many degrees."""
    others = ("translate_x", "translate_y", "scale", "stretch", "shear")
    return hyper.Affine(rotation=degrees, **dict.fromkeys(others))


def digits_task(seed: int, steps: int = 3000, examples: int = 300) -> Task:
    """So many training and as many validation images, all turned by up to 45 degrees; the rest is for the test."""
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


@registered
class StnCnn(Tuning):
    """Convolutional networks, with dropout rates, augmentation, Cutout and weight decay."""

    name = "stn-cnn"
    paper = "the talk's CNN experiment"
    datasets = ("digits", "cifar10")
    steps = {"digits": 3000, "cifar10": 60_000}  # noqa: RUF012

    def task(self, dataset, seed, steps):
        return digits_task(seed, steps)
