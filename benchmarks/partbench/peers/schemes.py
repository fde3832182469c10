"""The peers of a model: the dense one, three partitioned ones in plain PyTorch, and ours."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import partkernels as pk
import partnets
from partbench.measuring.timing import Missing
from partbench.peers.layer import Partitioning
from partnets.subnetworks.state import partition_of, state_of

SCHEMES = ("dense", "where", "parametrize", "paper", "partkernels")


def partitioned(model: nn.Module, partitioning: Partitioning, seed: int) -> nn.Module:
    """Partition the model in place, freeze modules without a rule, and move its weights away from their defaults.

    Otherwise all subnetworks would compute the same, and a wrong one would go unnoticed.
    """
    defaults = {"uniform": "seed", "zeros": "zero", "stored": "stored"}.get(partitioning.defaults)
    if defaults is None:
        raise ValueError(
            f"defaults={partitioning.defaults!r} are only for single layers; pass uniform, zeros or stored."
        )
    skip = partnets.without_rule(model)
    model = partnets.partition(model, partitioning.proportions, defaults=defaults, seed=seed, skip=skip)
    for path in skip:
        model.get_submodule(path).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, layer in weighted_layers(model):
            noise = torch.randn(layer.weight.shape, generator=generator).to(layer.weight)
            layer.weight += noise / (2 * layer.weight[0].numel()) ** 0.5
    return model


def nested(model: nn.Module, partitioning: Partitioning, x: Tensor) -> nn.Module:
    """Partition the model by nested partitions, as `partitioned` does by weights; FixUp layers at 0 give no gradients.

    Raises:
        Missing: no channels of this model can be partitioned, or torch-pruning is not installed.
    """
    skip = partnets.without_rule(model)
    options = {"scheme": "nested", "example": x, "skip": skip, "defaults": "zero"}
    try:
        partnets.partition(model, partitioning.proportions, **options)
    except (ImportError, ValueError) as error:
        raise Missing(str(error)) from error
    for path in skip:
        model.get_submodule(path).requires_grad_(False)
    with torch.no_grad():
        for _, layer in weighted_layers(model):
            layer.weight += torch.randn(layer.weight.shape).to(layer.weight) / (2 * layer.weight[0].numel()) ** 0.5
    return model


# Layers with a weight that each scheme computes differently; other layers are the same in all schemes.
WEIGHTED = nn.Linear, nn.Conv2d, nn.Embedding


def weighted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return the path and the layer, for each layer of a partitioned model that has a weight with a map."""
    layers = ((path, layer) for path, layer in model.named_modules() if isinstance(layer, WEIGHTED))
    return ((path, layer) for path, layer in layers if "weight" in getattr(state_of(layer), "weights", ()))


def under(scheme: str, model: nn.Module, active: int, update: int | None) -> nn.Module:
    """Copy a partitioned model under one of SCHEMES, for an active subnetwork and an updated partition.

    It computes in the context that `inside` returns.
    """
    if scheme == "partkernels":
        return copy.deepcopy(model)
    with pk.use_backend("reference"):  # the peers must not depend on our kernels
        dense = partnets.merge(model, active)
    for path, layer in weighted_layers(model) if scheme != "dense" else ():
        whole = dense.get_submodule(path)
        whole.weight = nn.Parameter(layer.weight.detach().clone())  # of all partitions
        new = _BY_SCHEME[scheme](layer, whole, active, update)
        if not path:
            return new
        dense.set_submodule(path, new)
    return dense


def inside(scheme: str, model: nn.Module, active: int, update: int | None) -> AbstractContextManager:
    """Return the context in which a model that `under` made computes, forward and backward."""
    return partnets.subnetwork(model, active, update) if scheme == "partkernels" else nullcontext()


def weight(module: nn.Module) -> nn.Parameter:
    """Return the trained weight of a layer that `under` made."""
    if parametrize.is_parametrized(module):
        return module.parametrizations.weight.original
    return (module.layer if isinstance(module, Where) else module).weight


class Where(nn.Module):
    """torch.where with a byte a weight and a second copy of the weights, as a user would write it."""

    def __init__(self, layer: nn.Module, whole: nn.Module, active: int, update: int | None) -> None:
        super().__init__()
        self.layer, self.active, self.update = whole, active, update
        self.register_buffer("ids", partition_of(layer, "weight").ids())
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
    def __init__(self, layer: nn.Module, active: int) -> None:
        super().__init__()
        self.register_buffer("live", partition_of(layer, "weight").ids() <= active)
        self.register_buffer("defaults", _default_values(layer))

    def forward(self, weight: Tensor) -> Tensor:
        return torch.where(self.live, weight, self.defaults)


def _parametrized(layer: nn.Module, whole: nn.Module, active: int, update: int | None) -> nn.Module:
    """Return torch's layer under torch.nn.utils.parametrize with a mask for one subnetwork."""
    whole.weight.requires_grad_(update is not None)
    parametrize.register_parametrization(whole, "weight", _Parametrization(layer, active), unsafe=True)
    return whole


def _default_values(layer: nn.Module) -> Tensor:
    weight = layer.weight
    return partition_of(layer, "weight").defaults.values(weight.shape, weight.dtype, weight.device).clone()


_BY_SCHEME = {"where": Where, "paper": Paper, "parametrize": _parametrized}
