"""Options: the measurements to make, and the settings that the suites take from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from partbench.measuring.clock import EventClock, WallClock
from partbench.peers import models
from partbench.peers.layer import CPU, THREE, Partitioning
from partbench.presets import Preset
from partkernels.backend.dispatch import BACKENDS


@dataclass(frozen=True)
class Options:
    """The measurements to make.

    Attributes:
        preset: with the changes of the command line.
        partitionings: ways to partition weights; models and their memory use the first.
        backends: of ours.
        input, classes: of a user's model.
    """

    preset: Preset
    device: torch.device = CPU
    threads: int = 1
    partitionings: tuple[Partitioning, ...] = (THREE,)
    backends: tuple[str, ...] = ("reference",)
    input: tuple[int, ...] | None = None
    classes: int | None = None

    def model(self, name: str) -> models.Model:
        return models.find(name, self.input, self.classes)

    def kernel_clock(self) -> WallClock | EventClock:
        """Return the clock for single operators: on a GPU without the host's launches, and with cold caches."""
        is_gpu = self.device.type == "cuda"
        return EventClock(self.device) if is_gpu else WallClock(self.device, self.preset.plan.sample)


def default_backends(device: torch.device) -> tuple[str, ...]:
    """Return our backends that are ready for a device; the reference only if there is no other."""
    # Triton's interpreter also runs on CPUs, slowly.
    is_ours = {n: b.devices == {device.type} and (b.automatic or device.type != "cpu") for n, b in BACKENDS.items()}
    return tuple(n for n in reversed(BACKENDS) if is_ours[n] and BACKENDS[n].is_ready) or ("reference",)
