"""Schedules change constrained values, not raw ones, and stay within their range."""

import math

import pytest
import torch

from partbench.baselines import schedules
from partnets import hyper

RANGES = [hyper.real, hyper.positive, hyper.probability, hyper.interval(-1.0, 3.0)]


def raw(value, range=hyper.real, n=1):
    return range.transform.inv(torch.full((n,), value, dtype=torch.float64))


@pytest.mark.parametrize("range", RANGES)
def test_noise_has_its_standard_deviation_in_values(range):
    schedule = schedules.gaussian(raw(0.5, range, 50), range=range)
    values = torch.stack([range.transform(schedule(step)) for step in torch.arange(200).tolist()])
    assert values.mean().item() == pytest.approx(0.5, abs=0.002)
    assert values.std().item() == pytest.approx(0.05, rel=0.05)
    # The noise is independent between steps and between hyperparameters.
    assert torch.corrcoef(values).fill_diagonal_(0).abs().max() < 0.7
    assert torch.corrcoef(values.T).fill_diagonal_(0).abs().max() < 0.4


@pytest.mark.parametrize("range", RANGES)
def test_a_sinusoid_has_its_amplitude_and_period_in_values(range):
    schedule = schedules.sinusoid(raw(0.5, range), range=range)
    for step in (0, 100, 300, 600, 900, 1200, 1500):
        expected = 0.5 + 0.1 * math.sin(2 * math.pi * step / 1200)
        assert range.transform(schedule(step)).item() == pytest.approx(expected, rel=1e-9)


def test_noise_follows_its_seed_and_step():
    start = raw(0.0, n=3)
    first, again, other = (schedules.gaussian(start, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first(5), again(5)) and not torch.equal(first(5), first(6))
    assert not torch.equal(first(5), other(5)) and torch.equal(start, raw(0.0, n=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("range", RANGES[1:])
def test_what_would_leave_the_range_goes_to_its_border(range, dtype):
    start = raw(0.5, range, 100).to(dtype)
    for schedule in (
        schedules.gaussian(start, std=5.0, range=range),
        schedules.sinusoid(start, amplitude=5.0, period=4, range=range),
    ):
        for step in (1, 3):
            moved = schedule(step)
            assert moved.dtype == dtype and moved.isfinite().all()
            assert ((range.low <= range.transform(moved)) & (range.transform(moved) <= range.high)).all()


def test_a_record_holds_each_value_and_then_the_last():
    values = torch.randn(3, 2)
    schedule = schedules.recorded(values, every=4)
    for step, index in {0: 0, 3: 0, 4: 1, 8: 2, 11: 2, 12: 2, 1000: 2}.items():
        assert torch.equal(schedule(step), values[index])


@pytest.mark.parametrize(
    ("construct", "message"),
    [
        (lambda: schedules.gaussian(raw(0.0), std=-1.0), "std=-1.0; pass a finite number of at least 0"),
        (lambda: schedules.gaussian(raw(0.0), std=math.nan), "std=nan; pass"),
        (lambda: schedules.sinusoid(raw(0.0), amplitude=math.inf), "amplitude=inf; pass"),
        (lambda: schedules.sinusoid(raw(0.0), period=0), "period=0; pass an int, at least 1"),
        (lambda: schedules.recorded([]), r"there are no values; pass at least one, \[m, n\]"),
        (lambda: schedules.recorded(torch.zeros(2, 1), every=0), "every=0; pass an int, at least 1"),
    ],
)
def test_wrong_use_raises_with_the_cure(construct, message):
    with pytest.raises(ValueError, match=message):
        construct()
