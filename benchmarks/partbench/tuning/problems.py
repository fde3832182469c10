"""Problems: networks, data and hyperparameters to tune. Some were used to choose the defaults of tune, others judge.

Networks are small, so that a problem takes minutes on two cores: 1 to 15 seconds a training.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from partbench.datasets import mnist
from partnets import hyper

# Problems on which the defaults of partnets.tune were chosen; all others only judge. "nothing" and "arrows" are among
# them because they showed that an earlier choice was too cautious, and another one too bold.
CHOOSING = ("noisy-labels", "friedman", "digits-150", "clean", "nothing", "digits-rotated", "digits-upright", "arrows")
REGULARISERS = ("dropout:one", "weight_decay", "label_smoothing")


@dataclass(frozen=True)
class Case:
    """One draw of a problem.

    Attributes:
        network: untrained.
        train, test: (x, y).
        tuned: the hyperparameters to tune; modules of partnets.hyper are placed before the network.
        steps, batch_size, optimizer, loss, clip: as for partnets.tune.
        known: values for the oracle's grid, by the names of settings, which the making of the data suggests.
    """

    network: nn.Module
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    tuned: list[Any]
    steps: int
    batch_size: int
    optimizer: Callable
    loss: Callable | None = None
    clip: float | None = None
    known: tuple[dict[str, float], ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of partnets.tune besides network, data and hyper."""
        names = ("steps", "batch_size", "optimizer", "loss", "clip")
        return {name: getattr(self, name) for name in names}


PROBLEMS: dict[str, Callable[[int, Path | None], Case]] = {}


def problem(name: str) -> Callable:
    """Register a function of a seed and the data folder under a name."""

    def register(make: Callable) -> Callable:
        PROBLEMS[name] = make
        return make

    return register


def adam(rate: float, **options) -> Callable:
    return functools.partial(torch.optim.Adam, lr=rate, **options)


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.Dropout(0.0)] * bool(i) + [nn.Linear(inputs, outputs), nn.ReLU()]
    # Each nn.Dropout becomes a separate module.
    return nn.Sequential(*(nn.Dropout(0.0) if isinstance(layer, nn.Dropout) else layer for layer in layers[:-1]))


def _generator(seed: int) -> torch.Generator:
    torch.manual_seed(seed)  # for the network
    return torch.Generator().manual_seed(seed + 1000)


def _teacher(generator: torch.Generator, inputs: int) -> Callable[[Tensor], Tensor]:
    linear = torch.randn(inputs, 1, generator=generator)
    first = torch.randn(inputs, 8, generator=generator) / inputs**0.5
    second = torch.randn(8, generator=generator)
    return lambda x: torch.tanh(x @ first * 1.5) @ second + (x @ linear)[:, 0] * 0.5 / inputs**0.5


def _classified(seed: int, examples: int, flipped: float, steps: int, batch_size: int) -> Case:
    generator = _generator(seed)
    score = _teacher(generator, 20)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 20, generator=generator)
        y = (score(x) > 0).long()
        return x, torch.where(torch.rand(n, generator=generator) < flipped, 1 - y, y)

    train, test = draw(examples), draw(4000)
    return Case(mlp(20, 128, 128, 2), train, test, list(REGULARISERS), steps, batch_size, adam(2e-3))


@problem("noisy-labels")
def noisy_labels(seed: int, _: Path | None) -> Case:
    return _classified(seed, 400, 0.25, 500, 32)


@problem("clean")
def clean(seed: int, _: Path | None) -> Case:
    return _classified(seed + 77, 2000, 0.0, 600, 64)


@problem("friedman")
def friedman(seed: int, _: Path | None) -> Case:
    generator = _generator(seed)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(n, 10, generator=generator)
        y = 10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
        y = y + torch.randn(n, generator=generator)
        return 2 * x - 1, (y[:, None] - 14.4) / 4.9

    return Case(mlp(10, 128, 128, 1), draw(100), draw(3000), ["dropout:one", "weight_decay"], 500, 32, adam(2e-3))


def _scikit(name: str, seed: int, examples: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    import sklearn.datasets

    x, y = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
    order = numpy.random.default_rng(seed + 5).permutation(len(x))
    x, y = torch.tensor(x[order], dtype=torch.float32), torch.tensor(y[order])
    mean, std = x[:examples].mean(0), x[:examples].std(0).clamp(min=1e-6)
    x = (x - mean) / std if name != "digits" else x / 16
    if y.is_floating_point():
        y = ((y - y[:examples].mean()) / y[:examples].std())[:, None].float()
    return (x[:examples], y[:examples]), (x[examples:], y[examples:])


def _tabular(source: str, examples: int, sizes: tuple[int, ...], steps: int, batch: int, seed: int, _) -> Case:
    torch.manual_seed(seed)
    # The targets of a regression cannot be smoothed.
    tuned = list(REGULARISERS if sizes[-1] > 1 else REGULARISERS[:2])
    return Case(mlp(*sizes), *_scikit(source, seed, examples), tuned, steps, batch, adam(1e-3))


for _name, *_given in (
    ("digits-150", "digits", 150, (64, 128, 128, 10), 400, 32),
    ("diabetes", "diabetes", 200, (10, 64, 64, 1), 800, 32),
    ("breast-cancer", "breast_cancer", 100, (30, 64, 64, 2), 600, 32),
    ("wine", "wine", 60, (13, 64, 64, 3), 600, 16),
):
    problem(_name)(functools.partial(_tabular, *_given))


@problem("imbalanced")
def imbalanced(seed: int, _: Path | None) -> Case:
    from sklearn.datasets import make_classification

    torch.manual_seed(seed)
    x, y = make_classification(
        4600, 30, n_informative=8, n_redundant=4, weights=[0.92], flip_y=0.05, class_sep=0.8, random_state=seed
    )
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    x = (x - x[:600].mean(0)) / x[:600].std(0)
    return Case(mlp(30, 100, 100, 2), (x[:600], y[:600]), (x[600:], y[600:]), list(REGULARISERS), 800, 64, adam(1e-3))


@problem("mixture")
def mixture(seed: int, _: Path | None) -> Case:
    generator = _generator(seed)
    centres = torch.randn(4, 3, 15, generator=generator) * 0.9

    def draw(n: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(4, (n,), generator=generator)
        which = torch.randint(3, (n,), generator=generator)
        return centres[y, which] + torch.randn(n, 15, generator=generator), y

    train, test = draw(250), draw(4000)
    tuned = ["dropout", "weight_decay", "label_smoothing"]
    sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    return Case(mlp(15, 200, 200, 4), train, test, tuned, 600, 32, sgd)


@problem("nothing")
def nothing(seed: int, _: Path | None) -> Case:
    """Make enough data for a small network, so that regularisation can only do harm."""
    generator = _generator(seed)
    score = _teacher(generator, 10)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 10, generator=generator)
        return x, (score(x)[:, None] + 0.1 * torch.randn(n, 1, generator=generator))

    return Case(mlp(10, 32, 32, 1), draw(8000), draw(4000), ["dropout:one", "weight_decay"], 1000, 64, adam(3e-3))


@problem("enough")
def enough(seed: int, _: Path | None) -> Case:
    """Make many examples of overlapping classes, so that there is little to gain."""
    from sklearn.datasets import make_classification

    torch.manual_seed(seed)
    options = {"n_informative": 10, "n_redundant": 0, "class_sep": 0.7, "flip_y": 0.0, "random_state": seed + 3}
    x, y = make_classification(12000, 15, n_classes=3, **options)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    tuned = list(REGULARISERS)
    return Case(mlp(15, 48, 48, 3), (x[:8000], y[:8000]), (x[8000:], y[8000:]), tuned, 1000, 64, adam(2e-3))


@problem("learning-rate")
def learning_rate(seed: int, _: Path | None) -> Case:
    """Start with a learning rate that is far too low, as in a first attempt."""
    torch.manual_seed(seed)
    sgd = functools.partial(torch.optim.SGD, lr=0.003, momentum=0.9)
    tuned = ["learning_rate", "weight_decay"]
    return Case(mlp(64, 128, 128, 10), *_scikit("digits", seed + 50, 400), tuned, 500, 32, sgd)


def cnn(channels: int, size: int, classes: int, widths: tuple[int, int, int]) -> nn.Sequential:
    a, b, c = widths
    left = size // 4
    return nn.Sequential(
        *(nn.Conv2d(channels, a, 3, padding=1), nn.GroupNorm(4, a), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(b, c, 3, padding=1), nn.GroupNorm(4, c), nn.ReLU(), nn.Flatten()),
        *(nn.Dropout(0.0), nn.Linear(c * left * left, classes)),
    )


def _digits(most: float, seed: int, _: Path | None) -> Case:
    (x, y), (test_x, test_y) = _scikit("digits", seed, 180)
    generator = _generator(seed)
    images = [_turned(part.view(-1, 1, 8, 8), most, generator) for part in (x, test_x)]
    tuned, known = [hyper.Affine(), "dropout:one", "weight_decay"], TURNS if most else MOVES
    return Case(
        cnn(1, 8, 10, (12, 24, 24)), (images[0], y), (images[1], test_y), tuned, 600, 32, adam(2e-3), known=known
    )


problem("digits-rotated")(functools.partial(_digits, math.pi / 2))
problem("digits-upright")(functools.partial(_digits, 0.0))


TURNS = (
    *({"rotation": angle} for angle in (45.0, 90.0, 179.0)),
    {"rotation": 90.0, "dropout": 0.3},
    {"rotation": 179.0, "dropout": 0.3},
    {"rotation": 179.0, "deformation": 0.1, "translation": 0.05},
)
MOVES = (
    *({"rotation": 15.0, "translation": moved, "deformation": moved} for moved in (0.05, 0.1, 0.15)),
    {"rotation": 15.0, "translation": 0.1, "deformation": 0.1, "dropout": 0.3},
    {"translation": 0.1},
    {"dropout": 0.4},
)


@problem("arrows")
def arrows(seed: int, _: Path | None) -> Case:
    """Draw arrows of random sizes at random places; the class is the direction, which rotations change."""
    generator, place = _generator(seed), torch.linspace(-1, 1, 24)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        size, width, x, y = torch.rand(4, n, 1, 1, generator=generator)
        size, width = 0.3 + 0.3 * size, 0.6 + 0.4 * width
        u, v = (place - 0.9 * x + 0.45) / size, (place[:, None] - 0.9 * y + 0.45) / size
        head, shaft = (v > -1) & (v < 0) & (u.abs() < (v + 1) * width), (v >= 0) & (v < 1) & (u.abs() < 0.25)
        labels = torch.randint(4, (n,), generator=generator)
        upright = (head | shaft).float()
        images = torch.stack([torch.rot90(one, int(label)) for one, label in zip(upright, labels, strict=True)])[
            :, None
        ]
        return images + 0.1 * torch.randn(images.shape, generator=generator), labels

    network = nn.Sequential(
        *(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(12, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.0), nn.Linear(576, 64), nn.ReLU(), nn.Linear(64, 4)),
    )
    tuned = [hyper.Affine(), "dropout:one", "weight_decay"]
    known = tuple({"translation": moved, "deformation": moved} for moved in (0.1, 0.15, 0.2))
    return Case(network, draw(200), draw(3000), tuned, 600, 32, adam(1e-3), known=(*known, *MOVES[3:]))


def _turned(images: Tensor, most: float, generator: torch.Generator) -> Tensor:
    angles = (2 * torch.rand(len(images), generator=generator) - 1) * most
    zero = torch.zeros_like(angles)
    matrices = torch.stack((angles.cos(), -angles.sin(), zero, angles.sin(), angles.cos(), zero), 1).view(-1, 2, 3)
    grid = torch.nn.functional.affine_grid(matrices, list(images.shape), align_corners=False)
    return torch.nn.functional.grid_sample(images, grid, align_corners=False)


load_mnist = functools.lru_cache(mnist)


def _mnist(examples: int, rotated: bool, seed: int, folder: Path | None) -> Case:
    generator = _generator(seed)
    data = load_mnist(_needed(folder))
    (x, y), (test_x, test_y) = data.train, data.test
    order = torch.randperm(len(x), generator=generator)[:examples]
    x, y, test_x, test_y = x[order].float() / 255, y[order], test_x[:3000].float() / 255, test_y[:3000]
    if rotated:
        x, test_x = (_turned(part, math.pi, generator) for part in (x, test_x))
    tuned, known = [hyper.Affine(), "dropout:one", "weight_decay"], TURNS if rotated else MOVES
    return Case(cnn(1, 28, 10, (12, 24, 64)), (x, y), (test_x, test_y), tuned, 600, 64, adam(2e-3), known=known)


def _needed(folder: Path | None) -> Path:
    if folder is None:
        raise ValueError(
            "this problem needs --data, a folder with MNIST/raw, cifar10/train/CLASS/*.png, cifar10/test/CLASS/*.png,"
            " wikitext2-valid.txt and wikitext2-test.txt."
        )
    return folder


for _name, *_given in (
    ("mnist-1000", 1000, False),
    ("mnist-rotated-1000", 1000, True),
    ("mnist-rotated-2500", 2500, True),
):
    problem(_name)(functools.partial(_mnist, *_given))


@problem("cifar10-2000")
def cifar10(seed: int, folder: Path | None) -> Case:
    generator = _generator(seed)
    train, test = (_pictures(_needed(folder) / "cifar10" / part, 2000, generator) for part in ("train", "test"))
    tuned = [hyper.Affine(), "dropout:one", "weight_decay", "label_smoothing"]
    return Case(cnn(3, 32, 10, (16, 32, 64)), train, test, tuned, 600, 64, adam(2e-3), known=MOVES)


class Residual(nn.Module):
    """Two convolutions with a shortcut (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()),
            *(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.shortcut = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layers(x) + self.shortcut(x)).relu()


@problem("resnet18")
def resnet18(seed: int, folder: Path | None) -> Case:
    """Use ResNet-18 with batch normalisation; a step takes 0.2 s on one core, so that Python's cost is negligible."""
    smaller = cifar10(seed, folder)
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [Residual(a, b, 1 + (a < b)) for a, b in itertools.pairwise(widths)]
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    network = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    tuned = [hyper.Affine(), "weight_decay", "label_smoothing"]
    return dataclasses.replace(smaller, network=network, tuned=tuned, steps=200, optimizer=adam(1e-3), known=MOVES[:5])


def _pictures(folder: Path, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Load random pictures from folders of classes, normalised as CIFAR-10's."""
    from PIL import Image

    paths = sorted(folder.glob("*/*.png"))
    classes = sorted({path.parent.name for path in paths})
    chosen = [paths[i] for i in torch.randperm(len(paths), generator=generator)[:count].tolist()]
    x = torch.stack([torch.from_numpy(numpy.array(Image.open(path))) for path in chosen]).permute(0, 3, 1, 2).float()
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in ((125.3, 123.0, 113.9), (63.0, 62.1, 66.7)))
    return (x - mean) / std, torch.tensor([classes.index(path.parent.name) for path in chosen])


class Recurrent(nn.Module):
    """An LSTM that predicts the next token."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.embedding, self.drop_in = nn.Embedding(tokens, width), nn.Dropout(0.0)
        self.lstm, self.drop_out = nn.LSTM(width, width, batch_first=True), nn.Dropout(0.0)
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop_out(self.lstm(self.drop_in(self.embedding(x)))[0]))


class Attending(nn.Module):
    """A small causal transformer."""

    def __init__(self, tokens: int, width: int, length: int) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(tokens, width), nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(width, tokens)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        h = self.embedding(x) + self.place[:length]
        return self.head(self.body(h, mask=self.mask[:length, :length], is_causal=True))


TOKENS, LENGTH = 2000, 32
DROPS = tuple({"dropout": rate} for rate in (0.1, 0.2, 0.35, 0.5, 0.65))


@functools.lru_cache
def words(folder: Path) -> tuple[Tensor, Tensor]:
    """Return the words of two texts as numbers, by frequency in the first; all rarer words have one number."""
    first, second = (
        (folder / f"wikitext2-{part}.txt").read_text(encoding="utf-8").split() for part in ("valid", "test")
    )
    numbers = {word: i for i, (word, _) in enumerate(Counter(first).most_common(TOKENS - 1))}
    first, second = (torch.tensor([numbers.get(word, TOKENS - 1) for word in part]) for part in (first, second))
    return first, second


def windows(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows of words, and of the words that follow."""
    rows = numbers[: (len(numbers) - 1) // LENGTH * LENGTH + 1]
    return rows[:-1].view(-1, LENGTH), rows[1:].view(-1, LENGTH)


def _text(seed: int, folder: Path | None, network: Callable[[], nn.Module], optimizer: Callable, steps: int) -> Case:
    train, test = words(_needed(folder))
    torch.manual_seed(seed)
    parts = windows(train[60_000 * seed :][:30_000]), windows(test[:60_000])
    return Case(network(), *parts, ["dropout:one", "weight_decay"], steps, 32, optimizer, clip=1.0, known=DROPS)


@problem("text-lstm")
def text_lstm(seed: int, folder: Path | None) -> Case:
    return _text(seed, folder, lambda: Recurrent(TOKENS, 96), adam(3e-3), 400)


@problem("text-transformer")
def text_transformer(seed: int, folder: Path | None) -> Case:
    rate = functools.partial(torch.optim.AdamW, lr=2e-3)
    return _text(seed, folder, lambda: Attending(TOKENS, 96, LENGTH), rate, 400)


class Adapted(nn.Module):
    """A language model of transformers as a module from tokens to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(input_ids=x).logits


@functools.lru_cache
def _pretrained(folder: Path) -> nn.Module:
    """Train a small GPT-2 on 120,000 words."""
    import transformers

    torch.manual_seed(0)
    sizes = {"n_embd": 96, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
    without = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(vocab_size=TOKENS, bos_token_id=0, eos_token_id=0, **sizes, **without)
    model = Adapted(transformers.GPT2LMHeadModel(config))
    x, y = windows(words(folder)[0][:120_000])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(300):
        batch = torch.randint(len(x), (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]).flatten(0, 1), y[batch].flatten()).backward()
        optimizer.step()
    return model.model


@problem("lora-gpt2")
def lora_gpt2(seed: int, folder: Path | None) -> Case:
    """Make adapters for 8,000 words of another text, with far more parameters than words."""
    import peft

    base = copy.deepcopy(_pretrained(_needed(folder)))
    torch.manual_seed(seed)
    targets = ["c_attn", "c_proj", "c_fc"]
    config = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.1, target_modules=targets, fan_in_fan_out=True)
    network = Adapted(peft.get_peft_model(base, config))
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    text = words(folder)[1][40_000 * seed :]
    rate = functools.partial(torch.optim.AdamW, lr=5e-3, weight_decay=0.0)
    parts = windows(text[:8000]), windows(text[8000:30_000])
    return Case(network, *parts, ["dropout:one", "weight_decay"], 200, 16, rate, clip=1.0, known=DROPS)
