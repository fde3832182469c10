"""The search: its plan, its initial values, the choice among them, and the end of a training."""

import math

import pytest
import torch

from partnets.tuning.hyperparameters import MAIN, Setting
from partnets.tuning.loss import guessed_nats, has_temperature
from partnets.tuning.search import best_end, choose, design, no_better, plan, weights
from partnets.tuning.training import due, learning_steps


def setting(name="decay", **options):
    return Setting(name, 0.0, 1.0, lambda training, value: None, **options)


@pytest.mark.parametrize("budget", [1.5, 2.0, 3.0, 6.0])
@pytest.mark.parametrize("batch_size", [32, 100])
def test_a_plan_spends_at_most_its_budget(budget, batch_size):
    planned = plan([setting()], budget, batch_size=batch_size, steps=2000, unseen=10_000)
    judged = 10 * (planned.members + 1) * planned.unseen / 3 / 2000
    spent = (planned.members * planned.member_batch + planned.confirm_batch + judged) / batch_size
    assert planned.members >= 4 and 0.7 * (budget - 1) <= spent <= budget - 1 + 1e-9


def test_gradient_learning_is_subtracted_from_the_total_budget():
    options = {"batch_size": 64, "steps": 2000, "unseen": 10_000}
    plain, learning = plan([setting()], 2.0, **options), plan([setting()], 2.0, learning=0.5, **options)
    assert plain.confirm_batch == 32 and learning.confirm_batch == pytest.approx(25.6)
    assert learning.member_batch == pytest.approx(0.8 * plain.member_batch, rel=1e-3)
    assert plan([], 2.0, learning=0.5, **options).confirm_batch == pytest.approx(64 / 1.5)


@pytest.mark.parametrize(
    ("settings", "budget", "options"),
    [
        ([setting()], 1.1, {"batch_size": 8, "steps": 10_000}),
        ([setting()], 2.0, {"batch_size": 20, "steps": 1000, "least": 4}),
        ([setting(name, factor=name) for name in (MAIN, "a", "b")], 2.0, {"batch_size": 26, "steps": 1000, "least": 4}),
        *(
            (settings, 1.05, {"batch_size": 32, "steps": 300, "learning": learning, "least": 4})
            for settings, learning in (([], 0.5), ([setting()], 0.5), ([], 0.0))
        ),
    ],
)
def test_a_budget_that_is_too_small_is_refused_with_one_that_is_not(settings, budget, options):
    with pytest.raises(ValueError, match=r"budget=.* leaves batches of fewer than .* pass a budget of") as error:
        plan(settings, budget, unseen=10, **options)
    assert plan(settings, float(str(error.value).split("budget of ")[1].split()[0]), unseen=10, **options)


def test_a_design_starts_untuned_and_moves_each_factor_separately_from_light_to_heavy():
    settings = [setting(), setting("rate", untuned=0.5)]
    points, factors = design(settings, {MAIN: 3}, seed=3)
    assert points[0].tolist() == [0.0, 0.5] and factors == ["", MAIN, MAIN, MAIN]
    assert (points[1:].diff(dim=0) > 0).all() and ((points >= 0) & (points <= 1)).all()
    settings = [setting(), setting("rotation", factor="turn"), setting("rate", untuned=0.5, factor="rate")]
    points, factors = design(settings, {MAIN: 3, "turn": 2, "rate": 2}, seed=0)
    moved = points != points[0]
    assert factors == ["", MAIN, MAIN, MAIN, "turn", "turn", "rate", "rate"]
    assert moved.sum(1).tolist() == [0] + [1] * 7 and moved[4:6, 1].all() and moved[6:, 2].all()


def test_settings_of_a_group_lie_close_to_each_other():
    points = design([setting(f"dropout.{i}", group="dropout") for i in range(4)], {MAIN: 3}, seed=0)[0]
    assert (points.amax(1) - points.amin(1)).max() < 0.16
    assert (points[1:].amax(1) - points[1:].amin(1)).min() > 0


EQUAL, CLEAR = [[7.0] * 10] * 3, [[500.0] * 10, [100.0] * 10, [100.0] * 10, [500.0] * 10]
EARLY, DIVERGED = [[0.0] * 4 + [50.0] * 6, [50.0] * 10], [[50.0] * 10, [50.0] * 10, [50.0] * 4 + [math.inf] * 6]
INDEPENDENT = [[50.0] * 10, [90.0] * 10, [49.0] * 10, [10.0] * 10]


@pytest.mark.parametrize(
    ("points", "factors", "judged", "expected"),
    [
        ([[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]], ["", MAIN, MAIN], EQUAL, [0.5, 0.5]),
        ([[0.0], [0.4], [0.6], [1.0]], ["", MAIN, MAIN, MAIN], CLEAR, [0.5]),
        ([[0.0], [1.0]], ["", MAIN], EARLY, [0.5]),  # early judgements do not count
        ([[0.0], [0.5], [1.0]], ["", MAIN, MAIN], DIVERGED, [0.25]),
        ([[0.0, 0.0], [0.6, 0.0], [0.0, 0.3], [0.0, 0.8]], ["", "a", "b", "b"], INDEPENDENT, [0.0, 0.8]),
    ],
)
def test_the_choice_is_the_mean_by_the_likelihood_of_unseen_data(points, factors, judged, expected):
    chosen, found = choose(torch.tensor(points), factors, torch.tensor(judged))
    assert chosen.tolist() == pytest.approx(expected, abs=1e-3)
    assert all(found[i] < 1e-3 for i, nats in enumerate(judged) if nats[-1] > min(nats[-1] for nats in judged) + 40)


def test_a_search_without_a_finite_loss_raises():
    with pytest.raises(FloatingPointError, match="no training of the search has a finite loss"):
        choose(torch.zeros(2, 1), ["", MAIN], torch.full((2, 10), math.inf))


def test_noisy_judgements_make_the_choice_cautious():
    """Compare equal means with and without noise of 10 nats."""
    noise = 10 * torch.tensor([1.0, -1.0]).repeat(5)
    steady = torch.tensor([[100.0], [110.0]]).expand(2, 10)
    assert weights(steady)[0] > 0.99
    assert 0.5 < weights(steady + noise)[0] < 0.8


def test_a_training_goes_on_to_its_end_unless_that_is_clearly_worse():
    falling = [10.0 - i for i in range(10)]
    assert best_end(falling) == 10
    assert best_end([*falling[:-1], falling[-2] + 0.2]) == 10
    assert 3 <= best_end([50.0, 30.0, 20.0, 20.0, 25.0, 40.0, 60.0, 80.0, 100.0, 120.0]) <= 4
    assert 5 < best_end([53.0, 51.0, 50.0, 50.5, 51.0, 51.5, 52.0, 52.5, 53.0, 53.5]) < 10


@pytest.mark.parametrize(
    ("loss", "y", "expected"),
    [
        (torch.nn.NLLLoss(), torch.tensor([0, 1, 1, 0, -100]), 4 * math.log(2)),
        (torch.nn.functional.binary_cross_entropy_with_logits, torch.tensor([[0.0, 1], [1, 1]]), 2 * math.log(2)),
        (torch.nn.functional.mse_loss, torch.tensor([[1.0], [3.0]]), 0.0),
        (torch.nn.functional.l1_loss, torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]]), 1.0),
        (lambda output, y: torch.stack([output, output]).mean(), [0, 1], 0.0),
    ],
)
def test_a_guess_is_the_best_constant_prediction(loss, y, expected):
    outputs = torch.zeros(5, 2)
    found = guessed_nats(loss, [(outputs[:1], y[:1]), (outputs[1 : len(y)], y[1:])])
    assert found == pytest.approx(expected)
    assert no_better(found + 100, [[found + 99.5] * 10]) and not no_better(found + 100, [[found + 60] * 10])


def test_trainings_are_judged_in_tenths_and_modules_learn_in_their_last_three_quarters():
    assert due(25, 5) == [5, 10, 15, 20, 25] and due(2) == [1, 2]
    assert learning_steps(1200) == (4, 225) and learning_steps(100) == (1, 75)
    assert has_temperature(torch.nn.CrossEntropyLoss()) and not has_temperature(torch.nn.MSELoss())
