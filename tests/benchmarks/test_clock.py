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
