"""The two ways of a GPU backend to compute a product: 'fused', by one kernel that rebuilds the weight as it multiplies;
'rebuild', by PyTorch's own from a weight that is rebuilt before. A backend chooses, unless one is asked for here.
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
        down, across: the tile's sizes.
        warps: of a program.
        stages: of the pipeline of loads.
    """

    down: int
    across: int
    warps: int
    stages: int


_forced: str | Config | None = None


def forced() -> str | Config | None:
    """What use_plan asks for, or None."""
    return _forced


@contextmanager
def use_plan(plan: str | Config) -> Iterator[None]:
    """Inside, every product is computed by one plan: 'fused', 'rebuild', or 'fused' in such tiles of Triton's."""
    if plan not in NAMES and not isinstance(plan, Config):
        raise ValueError(f"there is no plan {plan!r}; pass 'fused', 'rebuild' or a Config.")
    global _forced
    previous, _forced = _forced, plan
    try:
        yield
    finally:
        _forced = previous
