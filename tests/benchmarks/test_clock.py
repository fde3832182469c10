"""Tests of clocks on a simulated host and GPU: timed and untimed work, and captures that fail."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from partbench.measuring import clock


@pytest.fixture
def now(monkeypatch):
    """Return the seconds of a host's clock that only calls advance."""
    time = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(clock.time, "perf_counter", lambda: time.seconds)
    return time


def lasting(now, *seconds):
    """Return a call that takes the given seconds in turn, and the last of them from then on."""
    left = list(seconds)

    def call():
        now.seconds += left.pop(0) if len(left) > 1 else left[0]

    return call


def test_short_calls_fill_a_sample_and_their_slow_first_call_does_not_count(now):
    wall = clock.WallClock(torch.device("cpu"), sample=1e-3)
    call = lasting(now, 5e-3, 1e-5)
    assert wall.calls(call) in (100, 101)  # rounding
    assert wall.round([(call, 100), (lasting(now, 2.0), 3)]) == pytest.approx([1e-5, 2.0])


def test_long_calls_are_made_once(now):
    wall = clock.WallClock(torch.device("cpu"), sample=1e-3)
    made = []
    call = lasting(now, 1.0)
    assert wall.calls(lambda: made.append(call())) == 1
    assert len(made) == 1


class Gpu:
    """A stand-in for torch.cuda that keeps a log and advances its time by a millisecond with each call."""

    def __init__(self, capturable: bool) -> None:
        self.log, self.capturable, self.milliseconds = [], capturable, 0.0
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = gpu.milliseconds
                gpu.log.append("event")

            def elapsed_time(self, end):
                assert gpu.log[-1] == "synchronize", "events are read when all of them have happened"
                return end.at - self.at

        class CUDAGraph:
            def replay(self):
                gpu.work("replay")

        class capture:
            def __init__(self, graph):
                gpu.log.append("capture")

            def __enter__(self):
                if not gpu.capturable:
                    raise RuntimeError("operation not permitted when stream is capturing")

            def __exit__(self, *_):
                return False

        class Stream:
            def __init__(self, device):
                pass

            def __enter__(self):
                gpu.log.append("side stream")

            def __exit__(self, *_):
                pass

        self.Event, self.CUDAGraph, self.graph, self.Stream = Event, CUDAGraph, capture, Stream
        self.stream = lambda stream: stream

    def work(self, name):
        self.log.append(name)
        self.milliseconds += 1

    def synchronize(self, device=None):
        self.log.append("synchronize")

    def get_device_properties(self, device):
        return SimpleNamespace(L2_cache_size=1000)


@pytest.mark.parametrize("capturable", [True, False])
def test_on_a_gpu_each_call_starts_with_a_cold_cache_and_launches_are_not_timed(capturable, monkeypatch):
    gpu = Gpu(capturable)
    monkeypatch.setattr(torch, "cuda", gpu)
    events = clock.EventClock(torch.device("cpu"))
    assert events.evict.numel() == 2000
    monkeypatch.setattr(events, "evict", SimpleNamespace(zero_=lambda: gpu.log.append("evict")))
    call = events.prepare(lambda: gpu.work("call"))
    assert gpu.log[:4] == ["side stream", "call", "call", "call"], "a capture needs a warm start"
    name = "replay" if capturable else "call"
    assert events.calls(call) == 1
    gpu.log.clear()
    assert events.round([(call, 1), (call, 1)]) == [1e-3, 1e-3]
    assert gpu.log == 2 * ["evict", "event", name, "event"] + ["synchronize"]
