"""speed: what a layer's operators and its training cost, against what a user would pick instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product

from benchmarks import operators, training
from benchmarks.layer import Division, Layer, Tensors
from benchmarks.measure import Run, Workload

WORKS = (*operators.WORKS, "training")
OPERATOR_PEERS = ("dense", "where", "where, compiled")
TRAINING_PEERS = (*OPERATOR_PEERS, "parametrize", "paper")
COMPILED = tuple(f"{operator} {work}" for operator in ("linear", "conv2d") for work in WORKS)


def workloads(
    layers: Iterable[Layer],
    divisions: Iterable[Division],
    actives: Sequence[int],
    backends: Sequence[str],
    *,
    works: Sequence[str] = WORKS,
    compiled: Sequence[str] = COMPILED,
) -> list[Workload]:
    """A workload for each layer, division, work and live subnetwork.

    Args:
        layers, divisions: see benchmarks.layer.
        actives: live subnetworks; those above a division's C are left out.
        backends: of ours.
        works: of WORKS.
        compiled: where torch.compile is among the peers, of COMPILED; each layer costs it seconds once.
    """
    return [
        Workload(
            "speed",
            _case(layer, division, work, active),
            partial(Tensors, layer, division),
            _peers(layer, work, active, division.count, backends, compiled),
            _facts(layer, work),
        )
        for layer, division, work, active in product(layers, divisions, works, actives)
        if active <= division.count
    ]


def _peers(
    layer: Layer, work: str, active: int, count: int, backends: Sequence[str], compiled: Sequence[str]
) -> dict[str, Callable[[Tensors], Run]]:
    names = TRAINING_PEERS if work == "training" else OPERATOR_PEERS
    if f"{layer.operator} {work}" not in compiled:
        names = tuple(name for name in names if name != "where, compiled")
    names += tuple(f"partkernels {backend}" for backend in backends)
    if work == "training":
        return training.peers(names, active)
    # Where all partitions are live there is nothing to rebuild: PyTorch's operator runs, whatever the plan.
    planned = {"triton"} if work == "grad_weight" else {"cuda", "triton"} if active < count else set()
    for backend in sorted(planned & set(backends)):
        names += tuple(f"partkernels {backend} {plan}" for plan in operators.PLANS)
    return operators.peers(names, work, active)


def _case(layer: Layer, division: Division, work: str, active: int) -> dict[str, str | int]:
    return {
        "operator": layer.operator,
        "work": work.replace("_", " "),
        "shape": layer.shape,
        "dtype": str(layer.dtype).removeprefix("torch."),
        "device": layer.device.type,
        **division.case(),
        "active": active,
    }


def _facts(layer: Layer, work: str) -> dict[str, float]:
    """Arithmetic and least memory traffic of a call, which rooflines turn into the shortest possible time."""
    passes = 3 if work == "training" else 1
    return {"flops": passes * layer.flops, "bytes": passes * layer.bytes}
