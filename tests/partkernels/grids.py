"""The grids of the Triton kernels for huge weights and batches, as JSON; usage: python grids.py."""

from __future__ import annotations

import json
import sys

from torch import bfloat16

from partbench.compiled_kernels.without_gpu import META, Case, launches
from partbench.peers.layer import Layer

# A bfloat16 tensor with this many entries takes 8 GB.
HUGE = 1 << 32
GROUPS = 1 << 20


def of_bfloat16(x: tuple[int, ...], weight: tuple[int, ...], groups: int = 1) -> Layer:
    return Layer(x, weight, groups=groups, dtype=bfloat16, device=META)


LINEAR = [
    of_bfloat16((HUGE, 1), (1, 1)),
    of_bfloat16((1, HUGE), (1, HUGE)),
    of_bfloat16((1, 1), (HUGE, 1)),
    of_bfloat16((1 << 16, 1 << 16), (1 << 16, 1 << 16)),
]
CONVOLUTIONS = [
    of_bfloat16((HUGE >> 10, 1, 32, 32), (1, 1, 1, 1)),
    of_bfloat16((1, 1, 1, 1), (HUGE, 1, 1, 1)),
    of_bfloat16((1, GROUPS, 64, 64), (GROUPS, 1, 3, 3), GROUPS),
    of_bfloat16((1, 64 * GROUPS, 3, 3), (64 * GROUPS, 64, 1, 1), GROUPS),
]
COPIES = "subnetwork_weight", "subnetwork_weight_grad", "gather_entries", "scatter_entries"
CASES = [
    Case(f"{layer.operator}{work}", layer)
    for layer in LINEAR + CONVOLUTIONS
    for work in ("", "_grad_input", "_grad_weight")
]
CASES += [
    Case(operator, layer, bits=bits)
    for operator in (*COPIES, "sgd_steps", "adam_steps")
    for layer in LINEAR[1:] + CONVOLUTIONS[1:]
    for bits in ((2, 0) if operator.endswith("steps") else (2,))
]
CASES += [Case("embedding", layer) for layer in LINEAR]

if __name__ == "__main__":
    found = [
        (f"{case}, {plan}", launch)
        for case in CASES
        for plan in (("fused", "rebuild") if case.operator == "linear" else ("rebuild",))
        for launch in launches(case, plan)
    ]
    json.dump([(case, launch.name, launch.grid) for case, launch in found], sys.stdout)
