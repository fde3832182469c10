"""Each method finds the best penalty of a ridge regression from both sides, and its records are correct."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from pairwise import pairwise
from ridge import Ridge
from torch import nn

from partbench.baselines import bilevel, hypergradient, schedules

SGD = partial(torch.optim.SGD, lr=0.15)
# With the usual beta1=0.9, λ would still oscillate about the best value after these steps.
ADAM = partial(torch.optim.Adam, lr=0.2, betas=(0.5, 0.99))
SEEDS = [0]
DESCENTS = [
    {"method": "conjugate_gradients"},
    {"method": "neumann", "alpha": 0.15},
    {"method": "unrolled"},
    {"method": "unrolled", "restart": True, "inner_steps": 60},
    {"method": "truncated", "terms": 20},
]


def one(value):
    return torch.tensor([value], dtype=torch.float64)


def lowest(ridge, low=-8.0, high=4.0):
    """Return min F(λ) over a grid of one common penalty."""
    return min(ridge.reached(one(value)) for value in torch.linspace(low, high, 200).tolist())


@pytest.mark.cases(usual=0, full=2)
@pytest.mark.parametrize("seed", SEEDS)
@pairwise(strength=1, options=DESCENTS, start=[-5.0, 1.5])
def test_descent_comes_within_a_hundredth_of_the_way_to_the_best_penalty(options, start, seed):
    ridge = Ridge(seed)
    best = lowest(ridge)
    options = {"steps": 60, "inner_steps": 30, "optimizer": SGD, "hyper_optimizer": ADAM} | options
    result = bilevel(ridge.train, ridge.validate, ridge.start, one(start), **options)
    reached = ridge.reached(result.hyper)
    assert reached < 1.01 * best and reached - best < 0.01 * (ridge.reached(one(start)) - best)


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
def test_descent_of_twenty_penalties_beats_the_best_single_one(seed):
    ridge = Ridge(seed)
    # This learning rate is too high for penalties above exp(1.5).
    options = {"steps": 60, "inner_steps": 20, "optimizer": SGD, "hyper_optimizer": ADAM, "box": (-8.0, 1.5)}
    result = bilevel(ridge.train, ridge.validate, ridge.start, torch.zeros(20).double(), **options)
    assert ((result.values >= -8) & (result.values <= 1.5)).all() and (result.hyper == 1.5).any()
    assert ridge.reached(result.hyper) < 0.97 * lowest(ridge)


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("hidden", "start"),
    [(0, -3.0), (16, 2.0)],
)
def test_a_best_response_comes_within_a_twentieth(hidden, start, seed):
    ridge = Ridge(seed)
    result = bilevel(
        ridge.train,
        ridge.validate,
        ridge.start,
        one(start),
        method="best_response",
        steps=60,
        inner_steps=50,
        optimizer=partial(torch.optim.Adam, lr=0.01),
        hyper_optimizer=ADAM,
        box=(-4.0, 3.0),
        hidden=hidden,
    )
    assert ridge.reached(result.hyper) < 1.05 * lowest(ridge)
    assert result.validation[-1] == pytest.approx(ridge.reached(result.values[-1]), rel=0.2)


OPTIONS = {"optimizer": SGD, "hyper_optimizer": ADAM, "terms": 3, "alpha": 0.1, "box": (-4.0, 3.0)}


@pytest.mark.parametrize(
    ("method", "first", "each"),
    [
        ("conjugate_gradients", 0, 5 + 1 + 1 + 2 * 3 + 2),
        ("neumann", 0, 5 + 1 + 1 + 2 * 2 + 2),
        ("unrolled", 0, 5 + 2 * 5 + 1),
        ("truncated", 0, 5 + 2 * 3 + 1),
        ("best_response", 4 * 5, 1),
        ("fixed", 0, 5),
    ],
)
def test_each_outer_step_is_recorded_and_reported(method, first, each):
    ridge, seen, start = Ridge(), [], one(-1.0)
    before = ridge.start["w"].clone()

    def callback(step, weights, hyper):
        seen.append((step, ridge.validate(weights, hyper).item(), hyper.clone()))

    result = bilevel(
        ridge.train,
        ridge.validate,
        ridge.start,
        start,
        method=method,
        steps=4,
        inner_steps=5,
        callback=callback,
        **OPTIONS,
    )
    assert result.evaluations == [first + each * step for step in (1, 2, 3, 4)]
    assert [step for step, _, _ in seen] == [0, 1, 2, 3]
    assert [loss for _, loss, _ in seen] == pytest.approx(result.validation, rel=1e-12)
    assert torch.equal(torch.stack([hyper for _, _, hyper in seen]), result.values) and result.values.shape == (4, 1)
    assert torch.equal(result.values[0], start) and 0 < result.seconds[0] <= result.seconds[-1]
    assert result.seconds == sorted(result.seconds) and len(result.seconds) == 4
    assert ridge.validate(result.weights, result.hyper).item() == pytest.approx(result.validation[-1], rel=1e-12)
    assert torch.equal(result.hyper, result.values[-1]) == (method == "fixed")
    assert torch.equal(ridge.start["w"], before) and torch.equal(start, one(-1.0)) and start.grad is None


@pytest.mark.parametrize("method", ["conjugate_gradients", "unrolled"])
@pytest.mark.parametrize("restart", [False, True])
def test_an_outer_step_is_one_hypergradient_from_the_last_weights_or_the_first(method, restart):
    ridge, hyper, weights = Ridge(), one(-1.0), Ridge().start
    options = {"method": method, "inner_steps": 5, "optimizer": SGD}
    result = bilevel(
        ridge.train,
        ridge.validate,
        weights,
        hyper,
        steps=3,
        restart=restart,
        hyper_optimizer=partial(torch.optim.SGD, lr=0.5),
        **options,
    )
    for value, loss in zip(result.values, result.validation, strict=True):
        torch.testing.assert_close(value, hyper, rtol=1e-12, atol=0)
        found = hypergradient(ridge.train, ridge.validate, weights, hyper, **options)
        assert found.validation == pytest.approx(loss, rel=1e-12)
        hyper = hyper - 0.5 * found.gradient
        weights = ridge.start if restart else found.weights
    torch.testing.assert_close(result.hyper, hyper, rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", ["unrolled", "conjugate_gradients"])
def test_the_optimisers_state_is_kept_between_outer_steps(method):
    ridge, still = Ridge(), partial(torch.optim.SGD, lr=0.0)
    made = []

    def momentum(parameters, **options):
        made.append(torch.optim.SGD(parameters, lr=0.05, momentum=0.9, **options))
        return made[-1]

    halves, at_once = (
        bilevel(
            ridge.train,
            ridge.validate,
            ridge.start,
            one(-1.0),
            method=method,
            steps=steps,
            inner_steps=6 // steps,
            optimizer=momentum,
            hyper_optimizer=still,
        )
        for steps in (3, 1)
    )
    torch.testing.assert_close(halves.weights, at_once.weights, rtol=1e-12, atol=1e-12)
    # Otherwise each outer step would keep the graphs of all previous ones.
    assert not any(state["momentum_buffer"].requires_grad for one in made for state in one.state.values())


@pytest.mark.full
@pytest.mark.parametrize("method", ["conjugate_gradients", "neumann", "unrolled", "truncated", "best_response"])
def test_the_weight_decay_of_a_network_learns(method):
    # The labels are noise, so more decay is always better.
    network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    x, x_validation = torch.randn(2, 20, 8)
    y = torch.randn(20, 1)

    def train(weights, hyper):
        decay = sum(weight.square().sum() for weight in weights.values())
        return F.mse_loss(torch.func.functional_call(network, weights, x), y) + hyper.exp().sum() * decay

    def validate(weights, hyper):
        return torch.func.functional_call(network, weights, x_validation).square().mean()

    result = bilevel(
        train,
        validate,
        dict(network.named_parameters()),
        torch.tensor([-4.0]),
        method=method,
        steps=10,
        inner_steps=20,
        optimizer=partial(torch.optim.SGD, lr=0.05),
        hyper_optimizer=ADAM,
        alpha=0.05,
        damping=1.0,
        box=(-6.0, 0.0),
    )
    assert result.hyper.dtype == torch.float32 and result.hyper > -3.5
    assert all(result.weights[name].shape == weight.shape for name, weight in network.named_parameters())


def test_a_best_response_follows_its_seed():
    ridge = Ridge()
    first, again, other = (
        bilevel(
            ridge.train,
            ridge.validate,
            ridge.start,
            one(0.0),
            method="best_response",
            steps=2,
            inner_steps=3,
            seed=seed,
            **OPTIONS,
        ).validation
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_fixed_values_are_an_ordinary_training():
    ridge = Ridge()
    result = bilevel(
        ridge.train, ridge.validate, ridge.start, one(-0.5), method="fixed", steps=3, inner_steps=7, optimizer=SGD
    )
    weight = ridge.start["w"].clone().requires_grad_()
    optimizer = SGD([weight])
    for _ in range(21):
        optimizer.zero_grad()
        ridge.train({"w": weight}, one(-0.5)).backward()
        optimizer.step()
    torch.testing.assert_close(result.weights["w"], weight.detach(), rtol=1e-12, atol=1e-14)
    assert torch.equal(result.values, torch.full((3, 1), -0.5, dtype=torch.float64))


@pytest.mark.parametrize(
    "schedule",
    [
        schedules.gaussian(one(-0.5)),
        schedules.sinusoid(one(-0.5), period=10),
        schedules.recorded(torch.randn(4, 1).double(), every=5),
    ],
)
def test_a_schedule_gives_each_step_of_the_weights_its_value(schedule):
    ridge, given = Ridge(), []

    def train(weights, hyper):
        given.append(hyper.clone())
        return ridge.train(weights, hyper)

    result = bilevel(
        train, ridge.validate, ridge.start, schedule, method="fixed", steps=3, inner_steps=4, optimizer=SGD
    )
    assert all(torch.equal(hyper, schedule(step)) for step, hyper in enumerate(given)) and len(given) == 12
    assert torch.equal(result.values, torch.stack([schedule(step) for step in (3, 7, 11)]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "local"}, "method='local'; pass one of conjugate_gradients, .*, fixed"),
        ({"steps": 0}, "steps=0; pass an int, at least 1"),
        ({"inner_steps": 0}, "inner_steps=0; pass an int, at least 1"),
        ({"terms": 0}, "terms=0; pass"),
        ({"hidden": -1}, "hidden=-1; pass an int, at least 0"),
        ({"optimizer": None}, "optimizer=None; pass a function that makes one"),
        ({"hyper_optimizer": None}, "hyper_optimizer=None; pass a function that makes one"),
        ({"method": "neumann", "alpha": None}, "alpha=None; pass 'neumann'"),
        ({"method": "best_response", "box": None}, r"box=None; pass \(least, greatest\)"),
        ({"method": "best_response", "restart": True}, "restart=True; leave it out, as 'best_response' trains once"),
        ({"method": "fixed", "restart": True}, "restart=True; leave it out, as 'fixed' trains once"),
        ({"box": (1.0, 0.0)}, r"box=\(1.0, 0.0\) and hyper=.*; pass \(least, greatest\), finite, with hyper between"),
        ({"box": (1.0, 2.0)}, "with hyper between"),
        ({"box": (-1.0, float("inf"))}, "with hyper between"),
        (
            {"hyper": lambda step: one(0.0)},
            "hyper is a schedule, which 'conjugate_gradients' cannot learn; pass a tensor",
        ),
        ({"hyper": [0.0]}, r"hyper is \[0.0\]; pass a floating-point tensor"),
        ({"weights": {"w": torch.zeros(20).long()}}, r"weights\['w'\] is a tensor of torch.int64"),
    ],
)
def test_wrong_use_raises_before_any_loss_is_computed(arguments, message):
    called = []
    usual = {"weights": Ridge().start, "hyper": one(0.0), "steps": 2, "inner_steps": 2}
    with pytest.raises(ValueError, match=message):
        bilevel(called.append, called.append, **usual | OPTIONS | arguments)
    assert not called


@pytest.mark.parametrize("method", ["conjugate_gradients", "unrolled", "best_response"])
def test_a_training_loss_without_hyper_raises(method):
    ridge = Ridge()
    with pytest.raises(ValueError, match=r"the gradient of train.*does not depend on hyper; use hyper in train"):
        bilevel(ridge.validate, ridge.validate, ridge.start, one(0.0), method=method, steps=2, inner_steps=2, **OPTIONS)


@pytest.mark.parametrize("method", ["conjugate_gradients", "unrolled", "best_response", "fixed"])
def test_a_training_that_diverges_raises(method):
    ridge, options = Ridge(), OPTIONS | {"optimizer": partial(torch.optim.SGD, lr=1e200)}
    with pytest.raises(FloatingPointError, match=r"the loss of (train|validate) is (inf|nan)"):
        bilevel(ridge.train, ridge.validate, ridge.start, one(0.0), method=method, steps=2, inner_steps=5, **options)
