"""Learned numbers: values in the user's units, unconstrained parameters, and user-defined hyperparameters."""

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
# A range, a unit, a value in the user's units, and the explicit map from the parameter.
CASES = {
    "real": (hyper.real, 2, -3, lambda raw: raw),
    "positive": (hyper.positive, 1.0, 0.1, lambda raw: (1 + raw.exp()).log()),
    "probability": (hyper.probability, 1.0, 0.25, lambda raw: 1 / (1 + (-raw).exp())),
    "interval": (hyper.interval(-1.0, 3.0), DEGREE, 90.0, lambda raw: -1 + 4 / (1 + (-raw).exp())),
    "clamped": (hyper.clamped(-math.pi, math.pi), DEGREE, 90.0, lambda raw: raw),
}
every_range = pytest.mark.parametrize(("range", "unit", "value", "formula"), CASES.values(), ids=CASES)


@every_range
def test_a_value_comes_out_as_it_went_in(range, unit, value, formula):
    learned = hyper.Learned(value, range, unit=unit)
    assert learned().item() == pytest.approx(value * unit, rel=1e-5)
    assert learned.values("it") == {"it": pytest.approx(value, rel=1e-5)}
    assert [parameter.shape for parameter in learned.parameters()] == [()]


@every_range
def test_values_and_gradients_are_those_of_the_formula(range, unit, value, formula):
    learned = hyper.Learned([value, 0.5 * value], range, unit=unit).double()
    raw = learned.raw.detach().clone().requires_grad_()
    torch.testing.assert_close(learned(), formula(raw))
    (gradient,) = torch.autograd.grad(learned().square().sum(), learned.raw)
    torch.testing.assert_close(gradient, *torch.autograd.grad(formula(raw).square().sum(), raw))


@every_range
def test_whatever_the_parameter_the_value_is_finite_and_does_not_leave_its_range(range, unit, value, formula):
    learned = hyper.Learned([value] * 4, range, unit=unit)
    with torch.no_grad():
        learned.raw.copy_(torch.tensor([-80.0, -20.0, 20.0, 80.0]))
    values = learned().tolist()
    assert all(math.isfinite(v) and range.low - 1e-6 <= v <= range.high + 1e-6 for v in values)
    assert values == sorted(values)


OUTSIDE = [
    (hyper.real, math.inf, "a finite number"),
    (hyper.real, math.nan, "a finite number"),
    (hyper.positive, 0.0, "a finite number above 0"),
    (hyper.positive, 1e-60, "a finite number above 0"),
    (hyper.positive, math.inf, "a finite number above 0"),
    (hyper.probability, 1.0, "a number between 0 and 1, both excluded"),
    (hyper.probability, -0.1, "a number between 0 and 1"),
    (hyper.interval(0.0, 0.9), 0.9, r"a number between 0 and 0\.9"),
    (hyper.clamped(-1.0, 2.0), 2.5, "a number between -1 and 2"),
]


@pytest.mark.parametrize(("range", "value", "expected"), OUTSIDE)
def test_a_value_outside_its_range_or_on_its_border_raises(range, value, expected):
    with pytest.raises(ValueError, match=f"value={value}; pass {expected}"):
        hyper.Learned(value, range)
    with pytest.raises(ValueError, match=rf"value\.1={value}"):
        hyper.Learned([0.5, value], range)
    with pytest.raises(ValueError, match=f"second={value}"):
        hyper.Learned([0.5, value], range, names=("first", "second"))


def test_borders_are_told_in_the_users_units():
    with pytest.raises(ValueError, match=r"value=200\.0; pass a number between 0 and 180"):
        hyper.Learned(200.0, hyper.interval(0.0, math.pi), unit=DEGREE)


@pytest.mark.parametrize("make", [hyper.interval, hyper.clamped])
@pytest.mark.parametrize("borders", [(1.0, 1.0), (2.0, 1.0), (0.0, math.inf), (math.nan, 1.0)])
def test_borders_that_hold_nothing_raise(make, borders):
    with pytest.raises(ValueError, match="the lower one first"):
        make(*borders)


@pytest.mark.parametrize(
    "arguments",
    [{"value": [1.0], "names": "ab"}, {"value": [1.0, 2.0], "unit": [1.0]}, {"value": 1.0, "names": ["a"]}],
)
def test_lengths_that_differ_raise(arguments):
    with pytest.raises(ValueError, match="as many units and names as values"):
        hyper.Learned(range=hyper.real, **arguments)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@every_range
def test_copies_and_state_dicts_keep_the_value(range, unit, value, formula, duplicate):
    learned = hyper.Learned(value, range, unit=unit)
    twin = duplicate(learned)
    assert twin.values("it") == learned.values("it")
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


def test_a_hyperparameter_finds_its_values_under_attributes_indices_and_given_names():
    expected = {"strength": 0.5, "shift.0": 0.0, "shift.1": 0.0, "shift.2": 0.0, "small": 1.0, "large": 2.0}
    values = Noise().values()
    assert values == pytest.approx(expected) and list(values) == list(expected)


def test_a_users_own_hyperparameter_is_trained_and_recorded():
    torch.manual_seed(0)
    noise = Noise()
    model = partnets.partition(nn.Sequential(noise, nn.Linear(3, 2)), (0.5, 0.5))
    chunks = partnets.chunk((torch.randn(40, 3), torch.randint(2, (40,))), (0.5, 0.5))
    before = noise.values()
    history = partnets.Trainer(model, chunks, hyper=noise, batch_size=8).fit(2)
    assert {name: values[-1] for name, values in history.values.items()} == {
        f"0.{name}": value for name, value in noise.values().items()
    }
    assert all(noise.values()[name] != before[name] for name in before)


def test_parameters_of_hyperparameters_inside_one_another_count_once():
    model = hyper.Submodule(nn.Sequential(hyper.InputMask(3), nn.Linear(3, 2)))
    assert len(hyper.hyperparameters(model)) == 3


def test_a_hyperparameter_without_values_says_what_is_missing():
    with pytest.raises(NotImplementedError, match=r"values\(\)"):
        hyper.Hyperparameter().values()


def test_many_values_are_shown_as_their_number():
    assert repr(hyper.Learned(0.1, hyper.positive)) == "Learned(value=0.1)"
    assert repr(hyper.Learned([0.5] * 784, hyper.probability)) == "Learned(784 values)"
    assert "rotation=15" in repr(hyper.Affine())


def test_softplus_is_torchs():
    # Published results depend on the bits of the default augmentation's arithmetic.
    raw = torch.linspace(-30, 30, 101)
    assert torch.equal(hyper.positive.transform(raw), F.softplus(raw))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hyperparameters_stay_of_single_precision_in_a_model_of_a_lower_one(dtype):
    image, features = torch.rand(4, 3, 8, 8, dtype=dtype), torch.randn(4, 6, dtype=dtype)
    pairs = [
        (hyper.Affine(rotation=30.0), image),
        (hyper.ColourJitter(), image),
        (hyper.SchwobelAffine(), image),
        (hyper.InputMask(6), features),
        (hyper.ConcreteDropout(0.3), features),
        (hyper.InputNoise(0.3), features),
    ]
    for module, x in pairs:
        module = nn.Sequential(module, nn.Flatten(), nn.LazyLinear(1)).to(dtype)
        module(x).sum().backward()
        learned = [one for one in module.modules() if isinstance(one, hyper.Learned)]
        assert learned and all(one.raw.dtype == one.raw.grad.dtype == torch.float32 for one in learned)
    assert hyper.InputMask(3).double().probability.raw.dtype == torch.float64


WHOLE = {
    "mask": lambda: (hyper.InputMask(4), (3, 4)),
    "dropout": lambda: (hyper.Dropout(), (3, 4)),
    "concrete dropout": lambda: (hyper.ConcreteDropout(), (3, 4)),
    "noise": lambda: (hyper.InputNoise(), (3, 4)),
    "mixup": lambda: (hyper.Mixup(), (3, 4)),
    "affine": lambda: (hyper.Affine(), (2, 3, 8, 8)),
    "colours": lambda: (hyper.ColourJitter(), (2, 3, 8, 8)),
    "in training": lambda: (hyper.InTraining(hyper.Affine()), (2, 3, 8, 8)),
}


@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_whole_numbers_are_refused_by_what_would_round_to_them(make, dtype):
    module, shape = make()
    with pytest.raises(TypeError, match=rf"got {dtype}, and would round its results to whole numbers; pass x.float"):
        module(torch.ones(shape, dtype=dtype))
