"""Learned numbers: values in user units, unconstrained parameters, and user-defined hyperparameters."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partnets
from partnets import hyper

DEGREE = math.pi / 180
# A range, a unit, a value in user units, and the explicit map from the parameter.
CASES = {
    "real": (hyper.real, 2, -3, lambda raw: raw),
    "positive": (hyper.positive, 1.0, 0.1, lambda raw: (1 + raw.exp()).log()),
    "probability": (hyper.probability, 1.0, 0.25, lambda raw: 1 / (1 + (-raw).exp())),
    "interval": (hyper.interval(-1.0, 3.0), DEGREE, 90.0, lambda raw: -1 + 4 / (1 + (-raw).exp())),
    "logarithmic": (hyper.logarithmic(0.01, 100.0), 2.0, 0.5, lambda raw: 0.01 * 1e4 ** (1 / (1 + (-raw).exp()))),
}
every_range = pytest.mark.parametrize(("range", "unit", "value", "formula"), CASES.values(), ids=CASES)


@every_range
def test_values_and_gradients_are_those_of_the_formula(range, unit, value, formula):
    learned = hyper.Learned([value, 0.5 * value], range, unit=unit).double()
    assert learned.values("it") == pytest.approx({"it.0": value, "it.1": 0.5 * value}, rel=1e-5)
    raw = learned.raw.detach().clone().requires_grad_()
    torch.testing.assert_close(learned(), formula(raw))
    (gradient,) = torch.autograd.grad(learned().square().sum(), learned.raw)
    torch.testing.assert_close(gradient, *torch.autograd.grad(formula(raw).square().sum(), raw))


@every_range
def test_every_parameter_gives_a_finite_value_inside_the_range(range, unit, value, formula):
    learned = hyper.Learned([value] * 4, range, unit=unit)
    with torch.no_grad():
        learned.raw.copy_(torch.tensor([-80.0, -20.0, 20.0, 80.0]))
    values = learned().tolist()
    assert all(math.isfinite(v) and range.low - 1e-6 <= v <= range.high * (1 + 1e-6) for v in values)
    assert values == sorted(values)


def test_numbers_are_kept_in_single_precision_whatever_the_default():
    torch.set_default_dtype(torch.bfloat16)
    try:
        learned = hyper.Learned(0.999, hyper.probability)
        learned.assign(0.9999)
    finally:
        torch.set_default_dtype(torch.float32)
    assert learned.values("it") == pytest.approx({"it": 0.9999}) and learned.raw.dtype == torch.float32


OUTSIDE = [
    (hyper.real, math.inf, "a finite number"),
    (hyper.real, math.nan, "a finite number"),
    (hyper.positive, 0.0, "a finite number above 0"),
    (hyper.positive, 1e-60, "a finite number above 0"),
    (hyper.positive, math.inf, "a finite number above 0"),
    (hyper.probability, 1.0, "a number between 0 and 1, both excluded"),
    (hyper.probability, -0.1, "a number between 0 and 1"),
    (hyper.interval(0.0, 0.9), 0.9, r"a number between 0 and 0\.9"),
]


@pytest.mark.parametrize(("range", "value", "expected"), OUTSIDE)
def test_a_value_outside_its_range_or_on_its_border_raises(range, value, expected):
    with pytest.raises(ValueError, match=f"value={value}; pass {expected}"):
        hyper.Learned(value, range)
    with pytest.raises(ValueError, match=rf"value\.1={value}"):
        hyper.Learned([0.5, value], range)
    with pytest.raises(ValueError, match=f"second={value}"):
        hyper.Learned([0.5, value], range, names=("first", "second"))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@every_range
def test_copies_and_state_dicts_keep_the_value(range, unit, value, formula, duplicate):
    learned = hyper.Learned(value, range, unit=unit)
    twin = duplicate(learned)
    assert twin.values("it") == learned.values("it") == {"it": pytest.approx(value, rel=1e-5)}
    other = hyper.Learned(0.5 * value, range, unit=unit)
    other.load_state_dict(learned.state_dict())
    assert other.values("it") == learned.values("it")


class Noise(hyper.Hyperparameter):
    """A user-defined hyperparameter."""

    def __init__(self, features=3):
        super().__init__()
        self.strength = hyper.Learned(0.5, hyper.positive)
        self.shift = hyper.Learned([0.0] * features, hyper.real)
        self.scales = hyper.Learned([1.0, 2.0], hyper.positive, names=("small", "large"))

    def forward(self, x):
        return self.scales().sum() * (x + self.shift() + self.strength() * torch.randn_like(x))


def test_a_user_defined_hyperparameter_is_trained_and_recorded():
    torch.manual_seed(0)
    noise = Noise()
    before = noise.values()
    expected = {"strength": 0.5, "shift.0": 0.0, "shift.1": 0.0, "shift.2": 0.0, "small": 1.0, "large": 2.0}
    assert before == pytest.approx(expected) and list(before) == list(expected)
    model = partnets.partition(nn.Sequential(noise, nn.Linear(3, 2)), (0.5, 0.5))
    chunks = partnets.chunk((torch.randn(40, 3), torch.randint(2, (40,))), (0.5, 0.5))
    history = partnets.Trainer(model, chunks, hyper=noise, batch_size=8).fit(2)
    assert {name: values[-1] for name, values in history.values.items()} == {
        f"0.{name}": value for name, value in noise.values().items()
    }
    assert all(noise.values()[name] != before[name] for name in before)


def test_parameters_of_nested_hyperparameters_count_once():
    model = hyper.Submodule(nn.Sequential(hyper.InputMask(3), nn.Linear(3, 2)))
    assert len(hyper.hyperparameters(model)) == 3


def test_a_hyperparameter_without_a_values_method_raises():
    nothing = hyper.Hyperparameter()
    nothing.shift = nn.Parameter(torch.zeros(4))
    model = partnets.partition(nn.ModuleList([nothing, nn.Linear(4, 2)]), (0.5, 0.5))
    chunks = partnets.chunk((torch.randn(8, 4), torch.arange(8) % 2), (0.5, 0.5))
    for call in (nothing.values, lambda: partnets.Trainer(model, chunks, hyper=nothing)):
        with pytest.raises(NotImplementedError, match=r"values\(\)"):
            call()


def test_many_values_are_shown_as_their_number():
    assert repr(hyper.Learned(0.1, hyper.positive)) == "Learned(value=0.1)"
    assert repr(hyper.Learned([0.5] * 784, hyper.probability)) == "Learned(784 values)"
    assert "rotation=15" in repr(hyper.Affine())


def test_softplus_is_torchs():
    # Published results depend on the bits of the default augmentation's arithmetic.
    raw = torch.linspace(-30, 30, 101)
    assert torch.equal(hyper.positive.transform(raw), F.softplus(raw))
