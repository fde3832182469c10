"""Layers with their test inputs, and the expected outputs of their subnetworks. A new layer needs an entry in CASES."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from small_network import PROPORTIONS, perturbed
from torch import nn
from torch.testing._internal.common_modules import ModuleInput, module_db

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
    """

    make: Callable[[], nn.Module]
    given: tuple

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


def randn(*shape: int) -> torch.Tensor:
    """Draw numbers that are equal in every process."""
    return torch.randn(shape, generator=RANDOM)


class Token(nn.Module):
    """A module with broadcast parameters besides a layer, as in a vision transformer."""

    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 7, 8))
        self.gain, self.scale = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(()))
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.layer(x) * self.gain * self.scale


class Table(nn.Module):
    """A module that owns weights: a bias for each offset and head, and a matrix."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 2))
        self.matrix = nn.Parameter(torch.randn(8, 8))

    def reset_parameters(self):
        nn.init.constant_(self.table, 2.0)

    def forward(self, x):
        return x @ self.matrix + self.table.sum(1)[:, None]


class Reads(nn.Module):
    """A module that reads weights of its children, and only the dtype of another, as some attention does."""

    def __init__(self):
        super().__init__()
        self.read, self.asked, self.nested = nn.Linear(8, 8), nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 8, False)])

    def forward(self, x):
        x = self.asked(x.to(self.asked.weight.dtype))
        return F.linear(x, self.read.weight @ self.nested[0].weight, self.read.bias).tanh()


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


SEQUENCE, IDS = (4, 6, 8), torch.arange(12).view(3, 4) % 9
CASES = {
    "Linear": Case(lambda: nn.Linear(8, 8), SEQUENCE),
    "Bilinear": Case(lambda: nn.Bilinear(8, 8, 4), (randn(4, 8), randn(4, 8))),
    "Conv1d": Case(lambda: nn.Conv1d(6, 4, 3), SEQUENCE),
    "Conv2d": Case(lambda: nn.Conv2d(2, 4, 3), (4, 2, 6, 6)),
    "Conv3d": Case(lambda: nn.Conv3d(2, 4, 3), (4, 2, 4, 4, 4)),
    "ConvTranspose1d": Case(lambda: nn.ConvTranspose1d(6, 4, 3), SEQUENCE),
    "ConvTranspose2d": Case(lambda: nn.ConvTranspose2d(2, 4, 3), (4, 2, 6, 6)),
    "ConvTranspose3d": Case(lambda: nn.ConvTranspose3d(2, 4, 3), (4, 2, 4, 4, 4)),
    "Embedding": Case(lambda: nn.Embedding(9, 8), (IDS,)),
    "EmbeddingBag": Case(lambda: nn.EmbeddingBag(9, 8), (IDS,)),
    "MultiheadAttention": Case(lambda: nn.MultiheadAttention(8, 2, batch_first=True), (randn(*SEQUENCE),) * 3),
    "RNN": Case(lambda: nn.RNN(8, 8), SEQUENCE),
    "LSTM": Case(lambda: nn.LSTM(8, 8), SEQUENCE),
    "GRU": Case(lambda: nn.GRU(8, 8), SEQUENCE),
    "GroupNorm": Case(lambda: nn.GroupNorm(2, 4), (4, 4, 6, 6)),
    "LayerNorm": Case(lambda: nn.LayerNorm(8), SEQUENCE),
    "RMSNorm": Case(lambda: nn.RMSNorm(8), SEQUENCE),
    "BatchNorm1d": Case(lambda: nn.BatchNorm1d(8), (4, 8)),
    "BatchNorm2d": Case(lambda: nn.BatchNorm2d(2), (4, 2, 6, 6)),
    "BatchNorm3d": Case(lambda: nn.BatchNorm3d(2), (4, 2, 4, 4, 4)),
    "partnets.nn.Bias": Case(partnets.nn.Bias, SEQUENCE),
    "partnets.nn.Scale": Case(partnets.nn.Scale, SEQUENCE),
    "transformers' Conv1D": Case(conv1d_of_transformers, SEQUENCE),
    "timm's Linear": Case(of_timm("Linear", 8, 8), SEQUENCE),
    "timm's Conv2dSame": Case(of_timm("Conv2dSame", 2, 4, 3, 2), (4, 2, 6, 6)),
    "timm's BatchNormAct2d": Case(of_timm("BatchNormAct2d", 2), (4, 2, 6, 6)),
    "PReLU": Case(lambda: nn.PReLU(2), (4, 2, 6, 6)),
    "InstanceNorm2d": Case(lambda: nn.InstanceNorm2d(2, affine=True, track_running_stats=True), (4, 2, 6, 6)),
    "broadcast parameters": Case(Token, SEQUENCE),
    "own weights": Case(Table, SEQUENCE),
    "weights that a parent reads": Case(Reads, SEQUENCE),
    "tied weights": Case(Tied, (IDS,)),
}


def module_inputs(name: str, training: bool) -> list[ModuleInput]:
    """Return torch's test inputs for one of torch's layers, in float64; [] if torch has none."""
    torch.manual_seed(0)
    info = TORCHS.get(getattr(nn, name))
    return info.module_inputs_func(info, "cpu", torch.float64, requires_grad=False, training=training) if info else []


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
            for tensor in (getattr(module, name), getattr(module, name + ROWS)[k:]):
                tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
    return model
