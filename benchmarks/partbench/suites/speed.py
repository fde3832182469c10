"""speed: cost of a layer's operators and of its training, against a user's alternatives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from partbench.measuring.timing import Batch, Run, Workload
from partbench.peers import operators, training
from partbench.peers.layer import Layer, Partitioning, Tensors
from partbench.presets import COMPILED, WORKS, Preset
from partbench.suites.options import Options
from partkernels.backend.dispatch import BACKENDS

ABOUT = "forward, gradients and training of layers"
OPERATOR_PEERS = ("dense", "where", "where, compiled")
TRAINING_PEERS = (*OPERATOR_PEERS, "parametrize", "paper")


def batch(options: Options) -> Batch:
    """Return all that the preset names; further dtypes and kinds of defaults only for linear layers' forward pass."""
    preset, device, given = options.preset, options.device, options.partitionings
    linear, works = linear_layers(preset, preset.dtypes, device), preset.works
    kinds = [replace(each, defaults=k) for each in given for k in preset.forward_defaults if k != each.defaults]
    measured = (
        (linear + convolutions(preset, device), given, works),
        (linear_layers(preset, preset.forward_only, device), given, ("forward",)),
        (linear, kinds, ("forward",)),
    )
    found = []
    for layers, partitionings, some in measured:
        how = {"works": some, "compiled": preset.compiled}
        found += workloads(layers, partitionings, preset.actives, options.backends, **how)
    return Batch(found, options.kernel_clock(), preset.plan)


def linear_layers(preset: Preset, dtypes: Sequence[torch.dtype], device: torch.device) -> list[Layer]:
    return [Layer((m, k), (n, k), dtype=dtype, device=device) for dtype in dtypes for m, n, k in preset.linear]


def convolutions(preset: Preset, device: torch.device) -> list[Layer]:
    every = product(preset.dtypes, preset.conv2d)
    return [Layer(x, weight, **geometry, dtype=dtype, device=device) for dtype, (x, weight, geometry) in every]


def workloads(
    layers: Iterable[Layer],
    partitionings: Iterable[Partitioning],
    actives: Sequence[int],
    backends: Sequence[str],
    *,
    works: Sequence[str] = WORKS,
    compiled: Sequence[str] = COMPILED,
) -> list[Workload]:
    """Return a workload for each layer, partitioning, work and active subnetwork.

    Args:
        layers, partitionings: see partbench.peers.layer.
        actives: active subnetworks; those above a partitioning's C are left out.
        backends: of ours.
        works: of WORKS.
        compiled: of COMPILED, the cases with torch.compile among the peers; it takes seconds for each layer, once.
    """
    found = []
    for layer, partitioning, work, active in product(layers, partitionings, works, actives):
        if active <= partitioning.num_partitions:
            case = {"operator": layer.operator, "work": work.replace("_", " "), "shape": layer.shape}
            case |= {"dtype": str(layer.dtype).removeprefix("torch."), "device": layer.device.type}
            peers = _peers(layer, work, active, partitioning.num_partitions, backends, compiled)
            passes = 3 if work == "training" else 1
            # Arithmetic and least memory traffic, from which rooflines give the shortest possible time.
            facts = {"flops": passes * layer.flops, "bytes": passes * layer.bytes}
            setup = partial(Tensors, layer, partitioning)
            found.append(Workload("speed", {**case, **partitioning.case(), "active": active}, setup, peers, facts))
    return found


def _peers(
    layer: Layer, work: str, active: int, count: int, backends: Sequence[str], compiled: Sequence[str]
) -> dict[str, Callable[[Tensors], Run]]:
    names = TRAINING_PEERS if work == "training" else OPERATOR_PEERS
    if f"{layer.operator} {work}" not in compiled:
        names = tuple(name for name in names if name != "where, compiled")
    names += tuple(f"partkernels {backend}" for backend in backends)
    if work == "training":
        return training.peers(names, active)
    # If all partitions are active, there is nothing to rebuild: PyTorch's operator runs under any plan.
    has_choice = layer.operator == "linear" and active < count
    for backend in sorted(backends) if has_choice else ():
        if work in BACKENDS[backend].planned:
            names += tuple(f"partkernels {backend} {plan}" for plan in operators.PLANS)
    return operators.peers(names, work, active)
