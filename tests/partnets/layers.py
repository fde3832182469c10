"""All layers and their test inputs. A new layer needs an entry in this file and no changes to other test files."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.common_modules import FunctionInput, ModuleInput, module_db

import partnets
from partnets import models
from partnets.nn import registry
from partnets.nn.layer import PartitionedLayer

PROPORTIONS = (0.5, 0.3, 0.2)
RANDOM = torch.Generator().manual_seed(0)
TORCHS = {info.module_cls: info for info in module_db}


@dataclass(frozen=True)
class Case:
    """A layer that partnets.partition replaces.

    Attributes:
        make: a function that returns a small dense layer.
        given: the arguments of its forward, or the shape of the only argument.
        more: further cases besides torch's: constructor arguments, constructor keywords, forward arguments.
    """

    make: Callable[[], nn.Module]
    given: tuple
    more: Sequence[tuple[tuple, dict, tuple]] = ()

    def arguments(self) -> tuple:
        """Return new arguments; floating-point ones require gradients."""
        torch.manual_seed(1)
        made = (torch.randn(self.given),) if isinstance(self.given[0], int) else self.given
        return tuple(x.clone().requires_grad_() if x.is_floating_point() else x for x in made)

    def partitioned(self, **options) -> nn.Module:
        """Return the layer in three partitions, with weights that differ from their initial values."""
        torch.manual_seed(0)
        model = partnets.partition(nn.Sequential(self.make()), PROPORTIONS, **({"defaults": "seed"} | options))[0]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) / 4)
        return model


def randn(*shape: int) -> torch.Tensor:
    """Draw numbers that are equal in every process."""
    return torch.randn(shape, generator=RANDOM)


class Token(nn.Module):
    """A module with broadcast parameters."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return torch.cat([self.token.expand(len(x), -1, -1), x], 1) * self.gain


class Table(nn.Module):
    """A module that owns weights: a bias for each offset and head, and a matrix."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 2))
        self.matrix = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return x @ self.matrix + self.table.sum(1)[:, None]


class Reads(nn.Module):
    """A module that reads the parameters of its child."""

    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(8, 8)

    def forward(self, x):
        return self.projected(x).tanh()

    def projected(self, x):
        return F.linear(x, self.projection.weight, self.projection.bias)


def of_timm(name, *arguments):
    def make():
        import timm.layers

        return getattr(timm.layers, name)(*arguments)

    return make


def conv1d_of_transformers():
    from transformers.pytorch_utils import Conv1D

    return Conv1D(8, 8)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.table(ids))


def convolutions() -> Iterator[tuple[tuple, dict, tuple]]:
    """Yield cases of strides, dilation, groups and all padding modes, few of which torch tests."""
    for options in [
        {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 2)},
        {"kernel_size": 3, "dilation": 2, "padding": 2},
        {"kernel_size": 3, "groups": 2, "bias": False},
        {"kernel_size": 1, "groups": 4},
        {"kernel_size": 3, "padding": "valid"},
        {"kernel_size": (4, 2), "padding": "same", "dilation": (1, 2)},
        *({"kernel_size": 3, "padding": (2, 1), "padding_mode": m} for m in MODES),
        *({"kernel_size": 4, "padding": "same", "padding_mode": m} for m in MODES),
    ]:
        for shape in ((2, 4, 9, 8), (4, 9, 8)):
            yield (4, 8), options, (randn(*shape),)


def bags() -> Iterator[tuple[tuple, dict, tuple]]:
    """Yield cases of EmbeddingBag, for which torch has no test inputs."""
    ids, offsets, weights = torch.arange(15).view(3, 5) * 7 % 10, torch.tensor([0, 4, 4, 9]), randn(3, 5).abs()
    for options, arguments in [
        ({}, (ids,)),
        ({"mode": "sum"}, (ids, None, weights)),
        ({"mode": "sum", "padding_idx": 2}, (ids.flatten(), offsets, weights.flatten())),
        ({"mode": "max", "padding_idx": -1}, (ids.int(),)),
        ({"mode": "mean", "include_last_offset": True}, (ids.flatten(), offsets)),
    ]:
        yield (10, 4), options, arguments


MODES = "zeros", "reflect", "replicate", "circular"
SEQUENCE, IDS = (4, 6, 8), torch.arange(12).view(3, 4) % 9
ANY = [((), {}, (randn(2, 5),))]
SHAPES = [((7, 3), {}, (randn(2, 3, 7),)), ((7, 3), {}, (randn(0, 7),))]
# Cases by the names in docs/layers.md.
CASES = {
    "Linear": Case(lambda: nn.Linear(8, 8), SEQUENCE, SHAPES),
    "Bilinear": Case(lambda: nn.Bilinear(8, 8, 4), (randn(4, 8), randn(4, 8))),
    "Conv1d": Case(lambda: nn.Conv1d(6, 4, 3), SEQUENCE),
    "Conv2d": Case(lambda: nn.Conv2d(2, 4, 3), (4, 2, 6, 6), list(convolutions())),
    "Conv3d": Case(lambda: nn.Conv3d(2, 4, 3), (4, 2, 4, 4, 4)),
    "ConvTranspose1d": Case(lambda: nn.ConvTranspose1d(6, 4, 3), SEQUENCE),
    "ConvTranspose2d": Case(lambda: nn.ConvTranspose2d(2, 4, 3), (4, 2, 6, 6)),
    "ConvTranspose3d": Case(lambda: nn.ConvTranspose3d(2, 4, 3), (4, 2, 4, 4, 4)),
    "Embedding": Case(lambda: nn.Embedding(9, 8), (IDS,)),
    "EmbeddingBag": Case(lambda: nn.EmbeddingBag(9, 8), (IDS,), list(bags())),
    "MultiheadAttention": Case(lambda: nn.MultiheadAttention(8, 2, batch_first=True), (randn(*SEQUENCE),) * 3),
    "RNN": Case(lambda: nn.RNN(8, 8), SEQUENCE),
    "LSTM": Case(lambda: nn.LSTM(8, 8), SEQUENCE),
    "GRU": Case(lambda: nn.GRU(8, 8), SEQUENCE),
    "GroupNorm": Case(lambda: nn.GroupNorm(2, 4), (4, 4, 6, 6), [((2, 4, 1e-3), {}, (randn(0, 4, 5),))]),
    "LayerNorm": Case(lambda: nn.LayerNorm(8), SEQUENCE),
    "RMSNorm": Case(lambda: nn.RMSNorm(8), SEQUENCE),
    "BatchNorm1d": Case(lambda: nn.BatchNorm1d(8), (4, 8)),
    "BatchNorm2d": Case(lambda: nn.BatchNorm2d(2), (4, 2, 6, 6)),
    "BatchNorm3d": Case(lambda: nn.BatchNorm3d(2), (4, 2, 4, 4, 4)),
    "models.Bias": Case(models.Bias, SEQUENCE, ANY),
    "models.Scale": Case(models.Scale, SEQUENCE, ANY),
    "transformers' Conv1D": Case(conv1d_of_transformers, SEQUENCE),
    "timm's Linear": Case(of_timm("Linear", 8, 8), SEQUENCE),
    "timm's Conv2dSame": Case(
        of_timm("Conv2dSame", 2, 4, 3, 2),
        (4, 2, 6, 6),
        [((4, 8, 3), {"stride": 2, "dilation": (1, 2), "groups": 2}, (randn(2, 4, 9, 8),))],
    ),
    "timm's BatchNormAct2d": Case(of_timm("BatchNormAct2d", 2), (4, 2, 6, 6), [((3,), {}, (randn(2, 3, 4, 4),))]),
    "broadcast parameters": Case(Token, SEQUENCE),
    "own weights": Case(Table, SEQUENCE),
    "weights that a parent reads": Case(Reads, SEQUENCE),
    "tied weights": Case(Tied, (IDS,)),
}


def registered(foreign: bool = False) -> list[type[PartitionedLayer]]:
    """Return the layers in order of registration.

    Args:
        foreign: whether to include replacements for layers of other libraries, and to import those libraries.
    """
    if foreign:
        for home in registry.FOREIGN.values():
            importlib.import_module(home)
    layers = [getattr(registry.rule_of(one), "__self__", None) for one in registry.known()]
    # Leave out layers that tests and examples register, and best-response layers, which have separate tests.
    layers = [cls for cls in layers if cls is not None and cls.__module__.startswith("partnets.nn.")]
    return [cls for cls in dict.fromkeys(layers) if foreign or cls.__module__ not in registry.FOREIGN.values()]


def module_inputs(cls: type[PartitionedLayer], training: bool) -> list[ModuleInput]:
    """Return torch's test inputs for such a layer and those of its case, in float64."""
    info, found = TORCHS.get(cls.ordinary), []
    torch.manual_seed(0)
    if info is not None:
        found = info.module_inputs_func(info, "cpu", torch.float64, requires_grad=False, training=training)
    for case in (case for case in CASES.values() if case.more and type(case.make()) is cls.ordinary):
        for arguments, options, given in case.more:
            wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in given]
            found.append(ModuleInput(FunctionInput(*arguments, **options), FunctionInput(*wide)))
    return found
