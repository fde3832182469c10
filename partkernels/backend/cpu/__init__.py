"""The C++ backend for CPUs: csrc/cpu."""

from functools import cache

import torch

from partkernels.backend.description import Backend, load_library


@cache
def status() -> str:
    return load_library("cpu")


BACKEND = Backend(
    "cpu",
    status,
    rank=1,
    devices=frozenset({"cpu"}),
    dtypes=frozenset({torch.float32, torch.float64, torch.bfloat16}),
    namespace="partkernels_cpu",
    makes_maps=True,
    makes_defaults=True,
)
