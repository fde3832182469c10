"""The peers of a model: the dense one, three partitioned ones in plain PyTorch, and ours."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import partnets
from partbench.peers.layer import Division
from partnets.convert.replacing import replace_modules
from partnets.nn.layer import PartitionedLayer
from partnets.nn.partitioned import partitioned_layers

SCHEMES = ("dense", "where", "parametrize", "paper", "partkernels")


def partitioned(model: nn.Module, division: Division, seed: int) -> nn.Module:
    """Partition the model in place, except for modules without a rule, and move its weights away from their defaults.

    Otherwise all subnetworks would compute the same, and a wrong one would go unnoticed.
    """
    defaults = {"uniform": "seed", "zeros": "zero", "stored": "stored"}.get(division.defaults)
    if defaults is None:
        raise ValueError(f"defaults={division.defaults!r} are only for single layers; pass uniform, zeros or stored.")
    skip = partnets.without_rule(model)
    model = partnets.partition(model, division.proportions, defaults=defaults, seed=seed, skip=skip)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, layer in weighted_layers(model):
            noise = torch.randn(layer.weight.shape, generator=generator).to(layer.weight)
            layer.weight += noise / (2 * layer.weight[0].numel()) ** 0.5
    return model


def nested(model: nn.Module, division: Division, x: Tensor) -> nn.Module:
    """Partition the model by nested partitions, in place, and perturb weights: FixUp layers at 0 give no gradients."""
    partnets.partition(
        model, division.proportions, scheme="nested", example=x, skip=partnets.without_rule(model), defaults="zero"
    )
    with torch.no_grad():
        for _, layer in weighted_layers(model):
            layer.weight += torch.randn(layer.weight.shape).to(layer.weight) / (2 * layer.weight[0].numel()) ** 0.5
    return model


# Layers with a weight that each scheme computes differently; other layers are the same in all schemes.
WEIGHTED = partnets.Linear, partnets.Conv2d, partnets.Embedding


def weighted_layers(model: nn.Module) -> Iterator[tuple[str, PartitionedLayer]]:
    """Return the path and the layer, for each layer of a partitioned model that has a weight with a map."""
    return ((path, layer) for path, layer in partitioned_layers(model) if isinstance(layer, WEIGHTED))


def under(scheme: str, model: nn.Module, active: int, update: int | None) -> nn.Module:
    """Copy a partitioned model under one of SCHEMES, with a fixed active subnetwork and updated partition."""
    if scheme == "dense":
        return partnets.merge(model, active)
    model = copy.deepcopy(model)
    new = {}
    for _, layer in partitioned_layers(model):
        if scheme == "partkernels":
            layer.active, layer.update = active, update
        elif isinstance(layer, WEIGHTED):
            new[layer] = _BY_SCHEME[scheme](layer, active, update)
        else:
            new[layer] = layer.to_ordinary(active)
    return replace_modules(model, new)


def weight(module: nn.Module) -> nn.Parameter:
    """Return the trained weight of a layer that `under` made."""
    if parametrize.is_parametrized(module):
        return module.parametrizations.weight.original
    inside = module.layer if isinstance(module, Where) else module
    return dict(inside.named_parameters())["weight"]  # the attribute of a partitioned layer is its active weight


class Where(nn.Module):
    """torch.where with a byte a weight and a second copy of the weights, as a user would write it."""

    def __init__(self, layer: PartitionedLayer, active: int, update: int | None) -> None:
        super().__init__()
        self.layer = _whole(layer, active)
        self.active, self.update = active, update
        self.register_buffer("ids", layer.partition.ids())
        self.register_buffer("defaults", _default_values(layer))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.subnetwork_weight()
        if isinstance(self.layer, nn.Linear):
            return F.linear(x, weight, self.layer.bias)
        if isinstance(self.layer, nn.Embedding):
            return F.embedding(x, weight)
        return self.layer._conv_forward(x, weight, self.layer.bias)

    def subnetwork_weight(self) -> Tensor:
        weight = self.layer.weight if self.update else self.layer.weight.detach()
        return torch.where(self.ids <= self.active, weight, self.defaults)


class Paper(Where):
    """Appendix D.2's scheme: byte assignments, stored defaults, a weight masked at every step, a masked gradient."""

    def subnetwork_weight(self) -> Tensor:
        return _MaskedGradient.apply(self.layer.weight, self.ids, self.defaults, self.active, self.update)


class _MaskedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, ids, defaults, active, update):
        ctx.update = update
        ctx.save_for_backward(ids)
        return torch.where(ids <= active, weight, defaults)

    @staticmethod
    def backward(ctx, grad):
        if ctx.update is None:
            return None, None, None, None, None
        (ids,) = ctx.saved_tensors
        return torch.where(ids == ctx.update, grad, 0), None, None, None, None


class _Parametrization(nn.Module):
    def __init__(self, layer: PartitionedLayer, active: int) -> None:
        super().__init__()
        self.register_buffer("live", layer.partition.ids() <= active)
        self.register_buffer("defaults", _default_values(layer))

    def forward(self, weight: Tensor) -> Tensor:
        return torch.where(self.live, weight, self.defaults)


def _parametrized(layer: PartitionedLayer, active: int, update: int | None) -> nn.Module:
    """Return torch's layer under torch.nn.utils.parametrize with a mask for one subnetwork."""
    whole = _whole(layer, active)
    whole.weight.requires_grad_(update is not None)
    parametrize.register_parametrization(whole, "weight", _Parametrization(layer, active), unsafe=True)
    return whole


def _whole(layer: PartitionedLayer, active: int) -> nn.Module:
    """Return torch's layer with the weights of all partitions, and the bias of one subnetwork."""
    whole = layer.to_ordinary(active)
    whole.weight = nn.Parameter(layer.weight.detach().clone())
    return whole


def _default_values(layer: PartitionedLayer) -> Tensor:
    weight = layer.weight
    return layer.partition.defaults.values(weight.shape, weight.dtype, weight.device).clone()


_BY_SCHEME = {"where": Where, "paper": Paper, "parametrize": _parametrized}
