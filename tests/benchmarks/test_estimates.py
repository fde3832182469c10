"""Tests of estimates: intervals have their stated confidence, and changes are neither missed nor invented."""

from __future__ import annotations

import random

import pytest

from partbench.measuring.estimates import Estimate, change, ratios


def draws(generator: random.Random, count: int, centre: float = 1.0, noise: float = 0.1) -> Estimate:
    """Draw passes that are skewed as durations are, with the centre as their true median, and estimate it."""
    return Estimate.of([centre * generator.lognormvariate(0, noise) for _ in range(count)])


@pytest.mark.cases(usual=4)
@pytest.mark.parametrize("count", [6, 8, 9, 15, 30])
def test_intervals_contain_the_true_median_at_their_stated_confidence(count):
    generator = random.Random(count)
    estimates = [draws(generator, count) for _ in range(4000)]
    assert estimates[0].confidence >= 0.95
    held = sum(estimate.low <= 1 <= estimate.high for estimate in estimates) / len(estimates)
    assert held == pytest.approx(estimates[0].confidence, abs=0.012)


@pytest.mark.parametrize(("count", "confidence"), [(1, 0.0), (2, 0.5), (5, 0.9375)])
def test_the_interval_of_few_passes_is_their_range_with_its_confidence(count, confidence):
    estimate = Estimate.of(range(count))
    assert (estimate.low, estimate.high, estimate.confidence) == (0, count - 1, confidence)


def test_a_fifth_more_is_seen_through_noise():
    generator = random.Random(0)
    for _ in range(1000):
        assert change(draws(generator, 6, noise=0.02), draws(generator, 6, 1.2, noise=0.02)) > 0.1


def test_small_changes_are_not_reported_however_sure():
    before, after = Estimate(1.0, 1.0, 1.0, 0.97), Estimate(1.04, 1.04, 1.04, 0.97)
    assert change(before, after) is None
    assert change(before, after, smallest=0.03) == 0.04


def test_ratios_of_interleaved_samples_cancel_common_slowdowns():
    mood = [1.0, 10.0, 3.0]
    mine, theirs = [[2 * m for m in mood]], [mood]
    assert ratios(mine, theirs) == [2.0]
