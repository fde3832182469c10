"""settings: the settings of optimisers and schedulers, which a checkpoint replaces."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch

# The settings that schedulers change in the groups of their optimizer.
SCHEDULED = {"lr", "momentum", "betas"}


def settings_of(
    optimizers: Mapping[str, torch.optim.Optimizer | None], schedulers: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the settings of each group, and of each scheduler, by name.

    Args:
        optimizers: by name.
        schedulers: by name, "scheduler" for the optimizer "optimizer"; only arguments in their state_dict are returned.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> settings_of({"optimizer": optimizer})["optimizer.param_groups[0].lr"]
        0.1
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        >>> settings_of({}, {"scheduler": scheduler})
        {'scheduler.step_size': 5, 'scheduler.gamma': 0.1}
    """
    found, schedulers = {}, schedulers or {}
    for which, optimizer in optimizers.items():
        is_scheduled = schedulers.get(which.replace("optimizer", "scheduler")) is not None
        left_out = {"params", *(SCHEDULED if is_scheduled else ())}
        for i, group in enumerate(optimizer.param_groups if optimizer else ()):
            found |= {f"{which}.param_groups[{i}].{name}": group[name] for name in group if name not in left_out}
    for which, scheduler in schedulers.items():
        if scheduler is not None:
            given = [name for name in inspect.signature(type(scheduler)).parameters if name != "last_epoch"]
            state = scheduler.state_dict()
            found |= {f"{which}.{name}": state[name] for name in given if name in state}
    return found


def warn_of_others(before: Mapping[str, Any], after: Mapping[str, Any], path: str | PathLike, stacklevel: int) -> None:
    """Warn if settings of a checkpoint have replaced different ones."""
    others = [name for name, value in before.items() if str(value) != str(after.get(name))]
    changed = [f"{name} is {after.get(name)}, not {before[name]}" for name in others]
    if changed:
        warnings.warn(
            f"training continues with the settings in {path}: {', '.join(changed)}. To change them, set param_groups,"
            " or the scheduler's attributes, after load.",
            stacklevel=stacklevel + 1,
        )
