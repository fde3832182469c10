"""The two ways of a GPU backend to compute a product: 'fused', by one kernel that rebuilds the weight as it multiplies;
'rebuild', by PyTorch's own from a weight that is rebuilt before. A backend chooses, unless one is asked for here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

NAMES = ("fused", "rebuild")

_forced: object = None


def forced() -> object:
    """What use_plan asks for: a name, a backend's own configuration of its fused kernel, or None."""
    return _forced


@contextmanager
def use_plan(plan: object) -> Iterator[None]:
    """Inside, every product is computed by one plan: 'fused', 'rebuild', or a backend's fused kernel as configured."""
    if isinstance(plan, str) and plan not in NAMES:
        raise ValueError(f"there is no plan {plan!r}; pass 'fused', 'rebuild' or a Config.")
    global _forced
    previous, _forced = _forced, plan
    try:
        yield
    finally:
        _forced = previous
