"""The two plans by which a GPU backend computes a product, and a way to force one of them.

'fused' is one kernel that rebuilds the weight as it multiplies; 'rebuild' first rebuilds the weight and then calls
PyTorch's kernel. The backend chooses unless use_plan forces a plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

NAMES = ("fused", "rebuild")


@dataclass(frozen=True)
class Config:
    """A fused Triton kernel's tile and its schedule.

    Attributes:
        down, across: the tile's size.
        warps: the number of warps per program.
        stages: the number of stages of the load pipeline.
    """

    down: int
    across: int
    warps: int
    stages: int


_forced: str | Config | None = None


def forced() -> str | Config | None:
    """Return the plan that use_plan forces, or None."""
    return _forced


@contextmanager
def use_plan(plan: str | Config) -> Iterator[None]:
    """Compute every product inside the context by one plan: 'fused', 'rebuild', or 'fused' with this Triton Config."""
    if plan not in NAMES and not isinstance(plan, Config):
        raise ValueError(f"there is no plan {plan!r}; pass 'fused', 'rebuild' or a Config.")
    global _forced
    previous, _forced = _forced, plan
    try:
        yield
    finally:
        _forced = previous
