"""Layers with their test inputs, and the expected outputs of their subnetworks. A new layer needs an entry in CASES."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from small_network import PROPORTIONS, perturbed
from torch import nn
from torch.testing._internal.common_modules import FunctionInput, ModuleInput, module_db

import partnets
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.subnetworks.state import ROWS, partition_of, partitioned_modules, state_of
from partnets.subnetworks.switch import noted

RANDOM = torch.Generator().manual_seed(0)
TORCHS = {info.module_cls: info for info in module_db}


@dataclass(frozen=True)
class Case:
    """A layer that partnets.partition partitions.

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
        return perturbed(partnets.partition(self.make(), PROPORTIONS, **({"defaults": "seed"} | options)), 0.25)


@torch.no_grad()
def dense(model: nn.Module, active: int) -> nn.Module:
    """Return a copy of a model without partitions, with the parameters of a subnetwork made by torch.where and sums.

    Nothing here exchanges entries. Outside of subnetworks the model's buffers are those of the whole network.
    """
    twin = partnets.merge(model)
    for path, module in model.named_modules():
        if (state := state_of(module)) is None:
            continue
        other = twin.get_submodule(path)
        for name in state.weights:
            weight, partition = module.get_parameter(name), partition_of(module, name)
            defaults = partition.defaults.values(weight.shape, weight.dtype)
            other.get_parameter(name).copy_(torch.where(partition.ids() <= active, weight, defaults))
        for name, is_product in state.vectors.items():
            rows = getattr(module, f"{name}_rows")[:active]
            other.get_parameter(name).copy_(rows.prod(0) if is_product else rows.sum(0))
        for name in state.statistics if active < state.num_partitions else ():
            other.get_buffer(name).copy_(getattr(module, f"{name}_rows")[active - 1])
    return twin


def assert_learns(model: nn.Module, twin: nn.Module, active: int, update: int | None) -> None:
    """Check a model's gradients in a subnetwork against those of `dense`, of which partition `update` gets its own."""
    for path, module in model.named_modules():
        state = state_of(module)
        for name in () if state is None else (*state.weights, *state.vectors):
            grad, expected = module.get_parameter(name).grad, twin.get_submodule(path).get_parameter(name).grad
            if update is None or expected is None:
                assert grad is None or not grad.any()
                continue
            if name in state.weights:
                mask = partition_of(module, name).mask(update)
                assert not grad[~mask].any()
                expected = torch.where(mask, expected, 0)
            elif state.vectors[name]:
                rows = getattr(module, f"{name}_rows")
                expected = expected * rows[[k for k in range(active) if k != update - 1]].prod(0)
            torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-11)


def owned(model: nn.Module, k: int) -> dict[str, torch.Tensor]:
    """Return copies of everything that partition k owns, by the dotted names of parameters."""
    paths = {module: path for path, module in model.named_modules()}
    return {
        f"{paths[one.module]}.{one.name}".lstrip("."): one.take(one.stored.detach(), k).clone()
        for one in partitioned_parameters(model)
    }


@torch.no_grad()
def poison(model: nn.Module, k: int) -> nn.Module:
    """Set everything to NaN that partitions k, k + 1, ..., C own, and their subnetworks' statistics."""
    for one in partitioned_parameters(model):
        for later in range(k, len(PROPORTIONS) + 1):
            values = one.take(one.stored, later)
            one.put(one.stored, later, torch.full_like(values, torch.nan))
        one.combine()
    noted(partitioned_parameters(model))
    for module in partitioned_modules(model):
        for name in state_of(module).statistics:
            for tensor in (getattr(module, name), getattr(module, f"{name}_rows")[k - 1 :]):
                tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
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
    """Yield cases of strides, dilation, groups and all padding modes, which torch tests rarely."""
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
    "partnets.nn.Bias": Case(partnets.nn.Bias, SEQUENCE, ANY),
    "partnets.nn.Scale": Case(partnets.nn.Scale, SEQUENCE, ANY),
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


def module_inputs(name: str, training: bool) -> list[ModuleInput]:
    """Return torch's test inputs for one of torch's layers and those of its case, in float64."""
    cls, found = getattr(nn, name), []
    torch.manual_seed(0)
    if (info := TORCHS.get(cls)) is not None:
        found = info.module_inputs_func(info, "cpu", torch.float64, requires_grad=False, training=training)
    for case in (case for case in CASES.values() if case.more and type(case.make()) is cls):
        for arguments, options, given in case.more:
            wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in given]
            found.append(ModuleInput(FunctionInput(*arguments, **options), FunctionInput(*wide)))
    return found


def mask_of(one, k):
    """Return the mask of the entries of a partitioned parameter, or of its vectors, that partition k owns."""
    if one.partition is not None:
        return one.partition.mask(k)
    rows = torch.arange(1, one.state.num_partitions + 1) == k
    return rows.view(-1, *[1] * one.parameter.dim()).expand(one.stored.shape)


@torch.no_grad()
def spoil(model, k):
    """Make NaN of everything that subnetwork k must not read."""
    for one in partitioned_parameters(model):
        for later in range(k + 1, one.state.num_partitions + 1):
            one.stored[mask_of(one, later)] = torch.nan
        one.combine()
    noted(partitioned_parameters(model))
    for module in partitioned_modules(model):
        for name in state_of(module).statistics:
            if module.get_buffer(name).is_floating_point():
                module.get_buffer(name + ROWS)[k:] = torch.nan
                module.get_buffer(name).fill_(torch.nan)
    return model
