"""optim: cost of an optimiser's step over one partition, against torch.optim's over all weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import nn

from partbench.measuring.clock import WallClock
from partbench.measuring.timing import Batch, Run, Workload
from partbench.peers.layer import CPU, THREE, Partitioning
from partbench.peers.models import Model
from partbench.peers.schemes import partitioned, weighted_layers
from partbench.peers.train_step import dense_optimizer, partitioned_optimizer, seeded
from partbench.suites.options import Options
from partnets.subnetworks.state import partition_of, state_of

ABOUT = "optimisers' steps over one partition"
OPTIMIZERS = ("adam", "sgd")
PEERS = ("torch, fused", "torch, foreach", "partnets")
LR = 1e-3
# The updated partitions.
UPDATES = (1, 3)


@dataclass(frozen=True)
class Parameters:
    """The partitioned weights of a model, which are stepped."""

    model: Model
    partitioning: Partitioning = THREE
    device: torch.device = CPU


def batch(options: Options) -> Batch:
    partitioning, plan = options.partitionings[0], options.preset.plan
    of = [Parameters(options.model(name), partitioning, options.device) for name in options.preset.optim]
    return Batch(workloads(of), WallClock(options.device, plan.sample), plan)


def workloads(parameters: Iterable[Parameters], updates: Sequence[int] = UPDATES) -> list[Workload]:
    """Return a workload for each model, optimiser and updated partition."""
    found = []
    for of, optimizer, update in product(parameters, OPTIMIZERS, updates):
        if update <= of.partitioning.num_partitions:
            case = {"model": of.model.name, "optimizer": optimizer, "device": of.device.type}
            peers = {peer: partial(_run, peer, optimizer, update) for peer in PEERS}
            facts = {"share": of.partitioning.proportions[update - 1]}
            case |= {**of.partitioning.case(), "update": update}
            found.append(Workload("optim", case, partial(_setup, of), peers, facts))
    return found


def _setup(of: Parameters, seed: int) -> nn.Module:
    """Build the partitioned model; every weight has a gradient, and nothing else is trained."""
    with seeded(seed):
        model = partitioned(of.model.make().to(of.device), of.partitioning, seed).requires_grad_(False)
        for _, layer in weighted_layers(model):
            layer.weight.requires_grad_(True)
            layer.weight.grad = torch.randn(layer.weight.shape).to(layer.weight)
    return model


def _run(peer: str, name: str, update: int, model: nn.Module) -> Run:
    if peer == "partnets":
        mine = _copy(model)
        optimizer, layers = partitioned_optimizer(name, mine, LR), [layer for _, layer in weighted_layers(mine)]

        def step() -> None:
            for layer in layers:  # as partnets.subnetwork does before each training step
                state_of(layer).learned.add(update)
            optimizer.step(update)

        return Run(step, lambda: _check(name, update, model))
    return Run(_torch(name, _whole(model), **{peer.removeprefix("torch, "): True}).step, lambda: None)


def _torch(name: str, weights: dict[str, nn.Parameter], **implementation: bool) -> torch.optim.Optimizer:
    return dense_optimizer(name, list(weights.values()), LR, **implementation)


def _whole(model: nn.Module) -> dict[str, nn.Parameter]:
    """Copy the weights and their gradients as unpartitioned parameters."""
    weights = {path: nn.Parameter(layer.weight.detach().clone()) for path, layer in weighted_layers(model)}
    for path, layer in weighted_layers(model):
        weights[path].grad = layer.weight.grad.clone()
    return weights


def _copy(model: nn.Module) -> nn.Module:
    """Copy a model with its gradients."""
    new = copy.deepcopy(model)
    for mine, theirs in zip(new.parameters(), model.parameters(), strict=True):
        mine.grad = None if theirs.grad is None else theirs.grad.clone()
    return new


def _check(name: str, update: int, model: nn.Module) -> None:
    """Check that two steps move the partition's weights as torch's optimiser does, and no other weight by a bit."""
    ours, theirs = _copy(model), _whole(model)
    optimizers = partitioned_optimizer(name, ours, LR), _torch(name, theirs)
    for _ in range(2):
        optimizers[0].step(update=update)
        optimizers[1].step()
    before = dict(weighted_layers(model))
    for path, layer in weighted_layers(ours):
        owned = partition_of(layer, "weight").mask(update)
        assert torch.equal(layer.weight[~owned], before[path].weight[~owned]), f"{path}: other partitions have moved"
        torch.testing.assert_close(layer.weight[owned], theirs[path][owned])
