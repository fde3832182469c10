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
from partnets.tuning.hyperparameters import Setting, find_settings, put_before


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 3))


def found(names, model=None, make=torch.optim.Adam, steps=100):
    model = model or network()
    wrapped, names, outside = put_before(model, names)
    return wrapped, *find_settings(wrapped, names, outside, F.cross_entropy, make(model.parameters()), steps)


RECURRENT = {"a": nn.LSTM(4, 4, 2), "b": nn.MultiheadAttention(4, 2, dropout=0.2), "c": nn.GRU(4, 4)}


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("dropout", {}, [("dropout.2", 0.0, 0.9, 0.1), ("dropout.4", 0.0, 0.9, 0.3)]),
        ("dropout:one", {}, [("dropout", 0.0, 0.9, 0.3)]),
        ("dropout", {"model": nn.ModuleDict(RECURRENT)}, [("dropout.a", 0, 0.9, 0), ("dropout.b", 0, 0.9, 0.2)]),
        ("weight_decay", {}, [("weight_decay", 1e-6, 1.0, 0.0)]),
        ("weight_decay", {"make": functools.partial(torch.optim.AdamW, lr=1e-2), "steps": 1000},
         [("weight_decay", 0.001, 0.5, 0.01)]),  # in units of how far weights shrink
        ("label_smoothing", {}, [("label_smoothing", 0.0, 0.9, 0.0)]),
        ("learning_rate", {"make": functools.partial(torch.optim.SGD, lr=0.02)},
         [("learning_rate", 0.0008, 0.5, 0.02)]),
    ],
)  # fmt: skip
def test_names_have_ranges_and_untuned_values(name, options, expected):
    settings = found([name], **options)[1]
    assert [one.name for one in settings] == [name for name, *_ in expected]
    for one, (_, *numbers) in zip(settings, expected, strict=True):
        assert [one.low, one.high, one.untuned] == pytest.approx(numbers)
        assert one.value(one.position) == one.untuned


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


def test_modules_outside_go_before_the_network_and_act_in_training_only():
    model = network()
    wrapped, settings, direct, starts = found([hyper.Affine(shear=None)], model)
    assert wrapped[1] is model and type(wrapped[0]) is hyper.InTraining
    assert (settings, direct) == ([], ["0.module"])
    assert [s.name for s in starts] == ["translate_x", "translate_y", "rotation", "scale", "stretch"]
    assert {s.name: s.high for s in starts}["rotation"] == 180 and starts[0].value(0.0) == 0.0


def test_names_have_the_paths_of_the_users_network_also_behind_modules_outside():
    rest = nn.Sequential(nn.Flatten(), network())
    wrapped, rates, *_ = found([hyper.Affine(), "dropout", hyper.ColourJitter()], rest)
    assert [s.name for s in rates] == ["dropout.1.2", "dropout.1.4"]
    rates[1].put(types.SimpleNamespace(network=wrapped), 0.7)
    assert (rest[1][2].p, rest[1][4].p) == (0.1, 0.7)


def test_modules_that_act_in_prediction_learn_by_gradient():
    mask = hyper.InputMask(4)
    assert found([mask], nn.Sequential(mask, network()))[1:] == ([], ["0"], [])


@pytest.mark.parametrize("logarithmic", [False, True])
def test_positions_and_values_are_inverse(logarithmic):
    one = Setting("a", 0.1, 10.0, lambda *_: None, logarithmic=logarithmic, untuned=2.0)
    for position in (0.0, 0.2, 0.9, 1.0):
        again = Setting("a", 0.1, 10.0, lambda *_: None, logarithmic=logarithmic, untuned=one.value(position))
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
    assert seen[0] == (pytest.approx(0.3), pytest.approx(0.3), 0.0, 0.0, 1e-3)
    decay, smoothing, rate = (result.values[name] for name in names[1:])
    assert seen[-1] == (result.values["dropout"], result.values["dropout"], decay, smoothing, pytest.approx(rate))
    assert (model[2].p, model[4].p) == (0.1, 0.3)
