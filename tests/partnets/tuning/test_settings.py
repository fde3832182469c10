"""Settings: the meaning of names and modules in a network, and how a training uses their values."""

import functools
import math
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partnets
from partnets import hyper
from partnets.tuning.settings import Setting, find_settings, put_before


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 3))


def found(names, model=None, loss=F.cross_entropy, make=torch.optim.Adam, steps=100):
    model = model or network()
    wrapped, names, outside = put_before(model, names)
    return wrapped, *find_settings(wrapped, names, outside, loss, make(model.parameters()), steps)


def test_dropout_is_a_rate_for_each_module_or_one_for_all():
    each, one = found(["dropout"])[1], found(["dropout:one"])[1]
    assert [(s.name, s.untuned) for s in each] == [("dropout.2", 0.1), ("dropout.4", 0.3)]
    assert [(s.name, s.untuned) for s in one] == [("dropout", 0.3)]


def test_rates_of_recurrent_layers_and_attention_are_found():
    model = nn.ModuleDict({"a": nn.LSTM(4, 4, 2), "b": nn.MultiheadAttention(4, 2, dropout=0.2), "c": nn.GRU(4, 4)})
    assert [s.name for s in found(["dropout"], model)[1]] == ["dropout.a", "dropout.b"]


def test_a_network_without_dropout_is_refused_with_a_cure():
    with pytest.raises(ValueError, match=r"has no nn\.Dropout in training mode; put nn\.Dropout\(0\.1\)"):
        found(["dropout"], nn.Linear(4, 3))


def test_decay_of_adamw_is_in_units_of_how_far_weights_shrink():
    make = functools.partial(torch.optim.AdamW, lr=1e-2)
    (decay,) = found(["weight_decay"], make=make, steps=1000)[1]
    assert (decay.low, decay.high, decay.untuned) == pytest.approx((0.001, 0.5, 0.01))
    (coupled,) = found(["weight_decay"])[1]
    assert (coupled.low, coupled.high, coupled.value(0.0)) == (1e-6, 1.0, 0.0)


@pytest.mark.parametrize(("given", "put"), [((1e-4, 1e-2, 0.0), (0.005, 0.5, 0.0)), ((0.0, 0.0, 0.0), (0.5, 0.5, 0.5))])
def test_groups_keep_the_ratios_of_their_decays(given, put):
    model = network()
    layers = [module for module in model if isinstance(module, nn.Linear)]
    groups = [{"params": list(layer.parameters()), "weight_decay": d} for layer, d in zip(layers, given, strict=True)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    (decay,) = find_settings(model, ["weight_decay"], 0, F.cross_entropy, optimizer, 100)[0]
    decay.put(types.SimpleNamespace(optimizer=optimizer), 0.5)
    assert decay.untuned == max(given)
    assert tuple(group["weight_decay"] for group in optimizer.param_groups) == pytest.approx(put)


def test_an_optimizer_without_decay_is_refused():
    with pytest.raises(ValueError, match="weight_decay', which LBFGS does not take"):
        found(["weight_decay"], make=torch.optim.LBFGS)


def test_an_untuned_learning_rate_is_the_given_one():
    (rate,) = found(["learning_rate"], make=functools.partial(torch.optim.SGD, lr=0.02))[1]
    assert rate.value(rate.position) == 0.02 and rate.value(0.0) == pytest.approx(0.02 / 25)


def test_smoothing_needs_a_cross_entropy():
    with pytest.raises(ValueError, match="label_smoothing', which needs torch's cross-entropy"):
        found(["label_smoothing"], loss=F.mse_loss)


def test_modules_outside_go_before_the_network_and_act_in_training_only():
    model = network()
    affine = hyper.Affine(shear=None)
    wrapped, settings, direct, starts = found([affine], model)
    assert wrapped[1] is model and type(wrapped[0]) is hyper.InTraining
    assert (settings, direct) == ([], [affine])
    assert [s.name for s in starts] == ["translate_x", "translate_y", "rotation", "scale", "stretch"]
    assert {s.name: s.high for s in starts}["rotation"] == 180 and starts[0].value(0.0) == 0.0


def test_names_have_the_paths_of_the_users_network_also_behind_modules_outside():
    rest = nn.Sequential(nn.Flatten(), network())
    wrapped, settings, *_ = found([hyper.Affine(), "dropout", hyper.ColourJitter()], rest)
    rates = [s for s in settings if s.group == "dropout"]
    assert [s.name for s in rates] == ["dropout.1.2", "dropout.1.4"]
    rates[1].put(types.SimpleNamespace(network=wrapped), 0.7)
    assert (rest[1][2].p, rest[1][4].p) == (0.1, 0.7)


def test_modules_that_change_what_given_weights_predict_learn_by_gradient():
    mask = hyper.InputMask(4)
    _, settings, direct, starts = found([mask], nn.Sequential(mask, network()))
    assert direct == [mask] and settings == starts == []


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "hyper is empty; pass names: 'dropout'"),
        (["droput"], "hyper has 'droput'; the names are 'dropout'"),
        (["dropout", "dropout:one"], "pass one of them"),
        (["weight_decay", "weight_decay"], "weight_decay twice"),
    ],
)
def test_wrong_names_are_refused(names, message):
    with pytest.raises(ValueError, match=message):
        found(names)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([0.5], "hyper has a float"),
        ({"dropout": (0.0, 0.5)}, r"hyper is a dict; .* such as \['dropout'\]: each has its own range"),
        ({"dropout"}, "hyper is a set"),
        (0.5, "hyper is a float"),
    ],
)
def test_something_else_than_names_and_modules_is_refused(names, message):
    with pytest.raises(TypeError, match=message):
        found(names)


@pytest.mark.parametrize("logarithmic", [False, True])
def test_positions_and_values_are_inverse(logarithmic):
    one = Setting("a", 0.1, 10.0, lambda *_: None, logarithmic=logarithmic, untuned=2.0)
    for position in (0.0, 0.2, 0.9, 1.0):
        value = one.value(position)
        again = Setting("a", 0.1, 10.0, lambda *_: None, logarithmic=logarithmic, untuned=value)
        assert math.isclose(again.position, position, abs_tol=1e-6)


def test_values_reach_the_network_the_optimizer_and_the_loss():
    """Check the values that trainings use."""
    seen = []
    model, data = network(), (torch.randn(40, 4), torch.randint(3, (40,)))
    names = ["dropout:one", "weight_decay", "label_smoothing", "learning_rate"]

    def look(training):
        loss = training.loss.keywords["label_smoothing"]
        group = training.optimizer.param_groups[0]
        seen.append((training.network[2].p, training.network[4].p, group["weight_decay"], loss, group["lr"]))

    result = partnets.tune(model, data, names, steps=2, batch_size=16, callbacks=[look])
    first, last = seen[0], seen[-1]
    assert first == (pytest.approx(0.3), pytest.approx(0.3), 0.0, 0.0, 1e-3)
    decay, smoothing, rate = (result.values[name] for name in names[1:])
    assert last == (result.values["dropout"], result.values["dropout"], decay, smoothing, pytest.approx(rate))
    assert (model[2].p, model[4].p) == (0.1, 0.3)
