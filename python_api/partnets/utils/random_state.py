"""Functions to get, set and preserve the random states that models, data sets and callbacks draw from.

These are torch's states of the CPU and of one device, Python's and NumPy's, as data sets may augment with any of them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def get_state(device: torch.device) -> dict[str, Any]:
    """Return all states as tensors and plain values; None for "device" on the CPU and for NumPy if not imported."""
    numpy = sys.modules.get("numpy")
    drawn = None
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        drawn = [name, torch.from_numpy(keys.astype("int64")), *rest]
    return {
        "torch": torch.get_rng_state(),
        "device": None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device),
        "python": random.getstate(),
        "numpy": drawn,
    }


def set_state(state: dict[str, Any], device: torch.device) -> None:
    """Set the states to a result of `get_state`; leave the device's state if either device is the CPU."""
    torch.set_rng_state(state["torch"])
    if device.type != "cpu" and state["device"] is not None:
        torch.get_device_module(device).set_rng_state(state["device"], device)
    random.setstate(state["python"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and state["numpy"] is not None:
        numpy.random.set_state(_for_numpy(state["numpy"]))


def _for_numpy(state: list) -> tuple:
    name, keys, *rest = state
    return name, keys.numpy().astype("uint32"), *rest


def seed(number: int) -> None:
    """Seed the generators of the CPU with an int in [0, 2**63)."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number % 2**32)


def seed_all(number: int) -> None:
    """Seed the generators of the CPU and those of torch on all devices."""
    torch.manual_seed(number)
    seed(number)


@contextmanager
def preserved(device: torch.device) -> Iterator[dict[str, Any]]:
    """Restore the random states of torch, of `device`, of Python and of NumPy on exit; yield those at entry.

    Example:
        >>> with preserved(torch.device("cpu")):
        ...     first = torch.rand(1)
        >>> bool(torch.rand(1) == first)
        True
    """
    before = get_state(device)
    try:
        yield before
    finally:
        set_state(before, device)
