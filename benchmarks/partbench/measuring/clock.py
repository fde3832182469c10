"""Clocks: how long a call takes, on the host's clock or between events on a GPU."""

from __future__ import annotations

import math
import time
import timeit
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]


class WallClock:
    """The host's clock around enough calls to fill a sample. Caches are not cleared between calls.

    Args:
        device: of the work; a GPU is synchronised at both ends, so that all of the host's work for it counts.
        sample: the least duration of a sample [s], which makes the clock's overhead negligible.
    """

    def __init__(self, device: torch.device, sample: float) -> None:
        self.device, self.sample = device, sample

    def prepare(self, call: Call) -> Call:
        """Return the call in the form in which it is timed."""
        return call

    def calls(self, call: Call) -> int:
        """Return how many calls fill a sample, after making one or two."""
        if self.time(call, 1) > 10 * self.sample:  # perhaps only the first call is slow, but more take too long
            return 1
        return max(1, math.ceil(self.sample / self.time(call, 1)))

    def round(self, calls: Sequence[tuple[Call, int]]) -> list[float]:
        """Return one sample of each call, taken in turn, in seconds a call."""
        return [self.time(call, count) for call, count in calls]

    def time(self, call: Call, count: int) -> float:
        def work() -> None:
            for _ in range(count):
                call()
            self._wait()

        self._wait()
        # timeit switches garbage collection off.
        return timeit.timeit(work, number=1, timer=time.perf_counter) / count

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class EventClock:
    """A GPU's events around one call, with a cold L2 cache: the kernels' time, without the host's launches.

    Calls become CUDA graphs if they can be captured. Before each call, a buffer of twice the L2 cache's size is
    written. This evicts the inputs and gives the host time to launch a call that is not a graph.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self.evict = torch.empty(size, dtype=torch.uint8, device=device)

    def prepare(self, call: Call) -> Call:
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):  # autograd and cuBLAS do set-up that a capture does not allow
            for _ in range(3):
                call()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                call()
        except RuntimeError:  # the call synchronises; it can be timed without a graph
            torch.cuda.synchronize(self.device)
            return call
        return graph.replay

    def calls(self, call: Call) -> int:
        call()
        return 1

    def round(self, calls: Sequence[tuple[Call, int]]) -> list[float]:
        events = []
        for call, _ in calls:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.evict.zero_()
            start.record()
            call()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) / 1e3 for start, end in events]
