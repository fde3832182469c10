"""Hypergradients match ridge regression's closed form, and each method's bias matches its theory."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from ridge import Ridge
from torch import nn

from partbench.baselines import hypergradient

SGD = partial(torch.optim.SGD, lr=0.2)
SEEDS = [0]


def penalties(count, at=-1.0):
    return at + 0.5 * torch.randn(count, dtype=torch.float64)


def error(found, exact):
    return ((found.gradient - exact).norm() / exact.norm()).item()


@pytest.mark.cases(usual=4)
@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("options", "at_best"),
    [
        ({"method": "conjugate_gradients", "terms": 40}, True),
        ({"method": "neumann", "terms": 400, "alpha": 0.2}, True),
        ({"method": "conjugate_gradients", "terms": 40, "inner_steps": 400}, False),
        ({"method": "unrolled", "inner_steps": 400}, False),
        ({"method": "truncated", "inner_steps": 600, "terms": 400}, False),
    ],
)
def test_the_hypergradient_is_the_closed_forms(options, at_best, seed, count):
    ridge, hyper = Ridge(seed), penalties(count)
    weights = ridge.best(hyper) if at_best else ridge.start
    found = hypergradient(ridge.train, ridge.validate, weights, hyper, optimizer=SGD, **options)
    assert error(found, ridge.gradient(hyper)) < 1e-8
    assert found.validation == pytest.approx(ridge.reached(hyper), rel=1e-8)
    torch.testing.assert_close(found.weights, ridge.best(hyper), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("options", [{"method": "neumann", "alpha": 0.2}, {"method": "truncated", "inner_steps": 20}])
def test_the_bias_shrinks_with_the_terms(options, seed):
    ridge, hyper = Ridge(seed), penalties(20)
    biases = [
        error(
            hypergradient(ridge.train, ridge.validate, ridge.best(hyper), hyper, optimizer=SGD, terms=terms, **options),
            ridge.gradient(hyper),
        )
        for terms in (1, 2, 5, 10, 20)
    ]
    assert biases == sorted(biases, reverse=True) and biases[0] > 5 * biases[-1]


@pytest.mark.parametrize("terms", [1, 3, 10])
def test_steps_from_the_optimum_are_terms_of_the_neumann_series(terms):
    ridge, hyper = Ridge(), penalties(20)
    take = partial(hypergradient, ridge.train, ridge.validate, ridge.best(hyper), hyper, terms=terms)
    series = take(method="neumann", alpha=0.2)
    for method in ("unrolled", "truncated"):
        steps = take(method=method, inner_steps=terms if method == "unrolled" else terms + 3, optimizer=SGD)
        torch.testing.assert_close(steps.gradient, series.gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD,
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        partial(torch.optim.Adam, lr=0.1),
        partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1),
        partial(torch.optim.RMSprop, lr=0.1, momentum=0.5),
    ],
)
def test_unrolled_steps_of_any_optimiser_have_the_gradient_of_finite_differences(optimizer):
    ridge, hyper = Ridge(d=3), penalties(3)

    def after(hyper):
        weights = {"w": ridge.start["w"].clone().requires_grad_()}
        plain = optimizer(list(weights.values()))
        for _ in range(7):
            plain.zero_grad()
            ridge.train(weights, hyper).backward()
            plain.step()
        return ridge.validate(weights, hyper).item()

    found = hypergradient(
        ridge.train, ridge.validate, ridge.start, hyper, method="unrolled", inner_steps=7, optimizer=optimizer
    )
    moves = 1e-5 * torch.eye(3, dtype=torch.float64)
    expected = [(after(hyper + move) - after(hyper - move)) / 2e-5 for move in moves]
    torch.testing.assert_close(found.gradient, torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-9)
    # A differentiable Adam computes its step count in float32.
    assert found.validation == pytest.approx(after(hyper), rel=1e-4)


def test_what_validate_makes_of_hyper_itself_is_added():
    ridge, hyper = Ridge(), penalties(20)
    slope = torch.arange(20, dtype=torch.float64)
    for options in ({"terms": 40}, {"method": "unrolled", "inner_steps": 400, "optimizer": SGD}):
        with_direct = hypergradient(
            ridge.train,
            lambda weights, hyper: ridge.validate(weights, hyper) + slope @ hyper,
            ridge.best(hyper),
            hyper,
            **options,
        )
        torch.testing.assert_close(with_direct.gradient, ridge.gradient(hyper) + slope, rtol=1e-8, atol=1e-8)


def test_damping_adds_to_the_hessians_diagonal():
    ridge, hyper = Ridge(), penalties(1)
    w, damped = ridge.best(hyper)["w"], ridge.hessian(hyper) + 0.7 * torch.eye(20, dtype=torch.float64)
    by_w = torch.func.grad(lambda w: ridge.validate({"w": w}, hyper))(w)
    expected = -(hyper.exp() * w) @ torch.linalg.solve(damped, by_w)
    for options in ({"terms": 40}, {"method": "neumann", "terms": 400, "alpha": 0.2}):
        found = hypergradient(ridge.train, ridge.validate, {"w": w}, hyper, damping=0.7, **options)
        torch.testing.assert_close(found.gradient, expected.reshape(1), rtol=1e-8, atol=0)


@pytest.mark.parametrize(
    ("options", "expected", "calls"),
    [
        # One evaluation for the gradient of f, one for F, two for each of 5 products, two for the mixed product.
        ({"terms": 5}, 1 + 1 + 2 * 5 + 2, 1),
        ({"terms": 5, "inner_steps": 4}, 4 + 1 + 1 + 2 * 5 + 2, 5),
        ({"terms": 5, "method": "neumann", "alpha": 0.1}, 1 + 1 + 2 * 4 + 2, 1),
        ({"method": "unrolled", "inner_steps": 7}, 7 + 1 + 2 * 7, 7),
        ({"method": "truncated", "inner_steps": 7, "terms": 3}, 7 + 1 + 2 * 3, 7),
        ({"method": "truncated", "inner_steps": 7, "terms": 30}, 7 + 1 + 2 * 7, 7),
    ],
)
def test_evaluations_are_counted_and_each_loss_is_called_once_for_a_batch(options, expected, calls):
    ridge, called = Ridge(), {"train": 0, "validate": 0}

    def counting(name):
        def loss(weights, hyper):
            called[name] += 1
            return getattr(ridge, name)(weights, hyper)

        return loss

    found = hypergradient(counting("train"), counting("validate"), ridge.start, penalties(1), optimizer=SGD, **options)
    assert found.evaluations == expected and called == {"train": calls, "validate": 1}


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["conjugate_gradients", "neumann", "unrolled"])
def test_a_network_by_functional_call_has_the_gradient_of_finite_differences(method, dtype):
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    weights = dict(network.named_parameters())
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    x, x_validation = torch.randn(2, 12, 3, dtype=dtype)
    y, y_validation = ((x[:, 0] + 0.3 * x[:, 1] > 0).long() for x in (x, x_validation))

    def train(weights, hyper):
        decay = sum(decay * weight.square().sum() for decay, weight in zip(hyper.exp(), weights.values(), strict=True))
        return F.cross_entropy(torch.func.functional_call(network, weights, x), y) + decay

    def validate(weights, hyper):
        return F.cross_entropy(torch.func.functional_call(network, weights, x_validation), y_validation)

    hyper = torch.full((4,), -2.5, dtype=dtype, requires_grad=True)
    take = partial(
        hypergradient,
        train,
        validate,
        weights,
        method=method,
        inner_steps=40 if method == "unrolled" else 500,
        optimizer=partial(SGD, lr=0.5),
        alpha=0.5,
        terms=100,
    )
    found = take(hyper)
    assert found.gradient.dtype == dtype and found.gradient.shape == (4,)
    assert all(found.weights[name].dtype == dtype and not found.weights[name].requires_grad for name in weights)
    assert all(torch.equal(weights[name], before[name]) and weights[name].grad is None for name in weights)
    assert torch.equal(hyper, torch.full((4,), -2.5, dtype=dtype)) and hyper.grad is None
    if dtype == torch.float64:
        moves = 1e-4 * torch.eye(4, dtype=dtype)[::3]
        with torch.no_grad():
            shifted = [(hyper + move, hyper - move) for move in moves]
        expected = [(take(up).validation - take(down).validation) / 2e-4 for up, down in shifted]
        torch.testing.assert_close(found.gradient[::3], torch.tensor(expected, dtype=dtype), rtol=1e-4, atol=1e-7)


def quadratic(curvature):
    return lambda weights, hyper: (curvature * weights["w"].square()).sum() + (hyper * weights["w"]).sum()


def squares(weights, hyper):
    return (weights["w"] - 1).square().sum()


W = {"w": torch.zeros(2)}
HYPER = torch.ones(2)
CONVEX = quadratic(torch.ones(2))
SADDLE = quadratic(torch.tensor([1.0, -0.5]))


LOSSES = {"train": CONVEX, "validate": squares, "weights": W, "hyper": HYPER}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "hessian"}, "method='hessian'; pass one of conjugate_gradients, neumann, unrolled, truncated"),
        ({"terms": 0}, "terms=0; pass an int, at least 1"),
        ({"inner_steps": -1}, "inner_steps=-1; pass an int, at least 0"),
        ({"method": "unrolled"}, "inner_steps=0; pass an int, at least 1"),
        ({"method": "neumann"}, "alpha=None; pass 'neumann' the series' step"),
        ({"method": "neumann", "alpha": 0.0}, "alpha=0.0; pass"),
        ({"damping": -1.0}, "damping=-1.0; pass a number of at least 0"),
        ({"damping": float("nan")}, "damping=nan; pass"),
        ({"inner_steps": 1}, r"optimizer=None; pass a function that makes one, such as functools.partial\(SGD"),
        ({"inner_steps": 1, "optimizer": SGD(list(map(nn.Parameter, W.values())))}, "pass a function that makes one"),
        (
            {"method": "unrolled", "inner_steps": 1, "optimizer": partial(SGD, momentum=0.9, dampening=0.5)},
            "dampening=0.5 of the optimizer; pass 0",
        ),
    ],
)
def test_numbers_out_of_place_raise_with_the_cure(arguments, message):
    with pytest.raises(ValueError, match=message):
        hypergradient(**LOSSES | arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hyper": 1.0}, "hyper is 1.0; pass a floating-point tensor"),
        ({"hyper": torch.ones(2, dtype=torch.long)}, "hyper is a tensor of torch.int64; pass"),
        ({"weights": {}}, r"weights=\{\}; pass a dict of tensors, such as dict\(model.named_parameters"),
        ({"weights": [torch.zeros(2)]}, "pass a dict of tensors"),
        ({"weights": W | {"n": torch.zeros(1).long()}}, r"weights\['n'\] is a tensor of torch.int64; pass"),
        ({"weights": W | {"v": torch.zeros(1)}}, r"does not depend on weights\['v'\]; leave it out"),
        ({"train": lambda weights, hyper: CONVEX(weights, hyper).item()}, r"train\(weights, hyper\) returned .*scalar"),
        ({"train": lambda weights, hyper: weights["w"] * hyper}, r"train.*returned a tensor of shape \[2\]"),
        ({"train": lambda weights, hyper: CONVEX(weights, hyper).detach()}, "train.*depends on neither"),
        ({"train": squares}, "gradient of train.*does not depend on hyper; use hyper in train"),
        ({"train": lambda weights, hyper: squares(weights, hyper) + hyper.sum()}, "gradient of train.*on hyper"),
        ({"validate": lambda weights, hyper: weights["w"]}, r"validate\(weights, hyper\) returned a tensor of shape"),
        ({"validate": lambda weights, hyper: hyper.sum()}, "validate.*does not depend on the weights"),
        ({"validate": lambda weights, hyper: torch.tensor(1.0)}, "validate.*depends on neither"),
    ],
)
@pytest.mark.parametrize(
    "options", [{}, {"inner_steps": 2, "optimizer": SGD}, {"method": "unrolled", "inner_steps": 2, "optimizer": SGD}]
)
def test_losses_weights_and_hyper_that_do_not_fit_raise_with_the_cure(options, arguments, message):
    with pytest.raises(ValueError, match=message):
        hypergradient(**LOSSES | options | arguments)
    assert torch.equal(W["w"], torch.zeros(2)) and torch.equal(HYPER, torch.ones(2))


@pytest.mark.parametrize("method", ["conjugate_gradients", "unrolled"])
@pytest.mark.parametrize("which", ["train", "validate"])
def test_a_loss_that_is_not_finite_is_named(which, method):
    losses = {"train": CONVEX, "validate": squares}
    losses[which] = lambda weights, hyper: (weights["w"] + hyper).sum() / 0
    with pytest.raises(FloatingPointError, match=f"the loss of {which} is inf"):
        hypergradient(**losses, weights=W, hyper=HYPER, method=method, inner_steps=1, optimizer=SGD)


def test_a_hypergradient_that_is_not_finite_raises():
    adam = partial(torch.optim.Adam, lr=0.1)

    def train(weights, hyper):  # one weight stays at its minimum, where Adam's square root is not differentiable
        return (hyper * weights["w"].square()).sum()

    with pytest.raises(FloatingPointError, match=r"hypergradient by 'unrolled' is .*a larger eps, or SGD"):
        hypergradient(train, squares, W, HYPER, method="unrolled", inner_steps=2, optimizer=adam)


def test_negative_curvature_raises_and_damping_cures_it():
    with pytest.raises(
        ArithmeticError, match=r"has curvature -1 along a conjugate gradient.*add more than 1 to damping"
    ):
        hypergradient(quadratic(torch.tensor([-0.5, -0.5])), squares, W, HYPER)
    with pytest.raises(ArithmeticError, match="curvature"):
        hypergradient(SADDLE, squares, W, HYPER)
    found = hypergradient(SADDLE, squares, W, HYPER, damping=1.5)
    # (H + 1.5)⁻¹ ∂F/∂w, with H = diag(2, -1).
    torch.testing.assert_close(found.gradient, torch.tensor([2 / 3.5, 2 / 0.5]))


def test_a_linear_loss_has_no_curvature():
    with pytest.raises(ArithmeticError, match="has curvature 0"):
        hypergradient(quadratic(0.0), squares, W, HYPER)


@pytest.mark.parametrize(("train", "alpha"), [(SADDLE, 0.3), (CONVEX, 1.1)])
def test_a_neumann_series_that_grows_raises(train, alpha):
    with pytest.raises(ArithmeticError, match=r"series grows: its last of 20 terms is .* as its first; pass a lower"):
        hypergradient(train, squares, W, HYPER, method="neumann", alpha=alpha)


def test_a_validation_loss_at_its_minimum_has_no_hypergradient():
    found = hypergradient(CONVEX, squares, {"w": torch.ones(2)}, HYPER)
    assert torch.equal(found.gradient, torch.zeros(2))
