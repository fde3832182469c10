"""The best state is the model at the highest L_ML, bit for bit; patience counts evaluations without improvement."""

import math

import pytest
import torch
from torch import nn

import partnets
from partnets import hyper
from partnets.training.best_model import Best

PROPORTIONS = (0.6, 0.4)
NAN = math.nan


def trainer(**arguments):
    x = torch.randn(60, 4)
    mask = hyper.InputMask(4, temperature=0.5)
    model = partnets.partition(nn.Sequential(mask, nn.Linear(4, 2)), PROPORTIONS)
    chunks = partnets.chunk((x, (x[:, 0] > 0).long()), PROPORTIONS)
    return partnets.Trainer(model, chunks, **{"hyper": mask, "batch_size": 16, "lml_every": 1} | arguments)


def state(model):
    return {name: tensor.detach().clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def scripted(monkeypatch):
    """Return a function that makes L_ML evaluate to the given numbers in turn."""

    def script(*numbers):
        left = iter(numbers)
        monkeypatch.setattr(partnets.training.trainer, "lml", lambda *_, **__: next(left))

    return script


def fill(model, value):
    with torch.no_grad():
        for tensor in state_tensors(model):
            tensor.fill_(value)


def state_tensors(model):
    return [*model.parameters(), *model.buffers()]


def test_best_keeps_a_copy_of_the_highest_and_ignores_nan():
    model, best = nn.BatchNorm1d(2), Best()
    for step, (lml, kept) in enumerate([(NAN, False), (-5.0, True), (NAN, False), (-5.0, False), (-4.0, True)]):
        fill(model, step)
        assert best.offer(model, step, lml) is kept
    fill(model, 9)
    best.restore(model)
    assert (best.step, best.lml) == (4, -4.0) and all((tensor == 4).all() for tensor in state_tensors(model))
    fill(model, 9)
    assert all((tensor == 4).all() for tensor in best.state.values())


@pytest.mark.parametrize("lml", [None, NAN, -math.inf])
def test_best_that_kept_nothing_raises_and_changes_nothing(lml):
    model, best = nn.Linear(2, 2), Best()
    before = state(model)
    if lml is not None:
        best.offer(model, 1, lml)
    with pytest.raises(ValueError, match="no state has been kept; evaluate L_ML first"):
        best.restore(model)
    assert same(state(model), before)


@pytest.mark.parametrize(
    ("lmls", "best"),
    [
        ([-9.0, -7.0, -8.0, -7.5], 2),
        ([NAN, -7.0, NAN, -8.0], 2),
        ([-5.0, -4.0, -4.0, NAN], 2),
    ],
)
def test_the_restored_model_has_the_bits_of_the_step_with_the_highest_lml(lmls, best, scripted):
    states = {}
    one = trainer(lml_every=2, keep_best=True, callbacks=[lambda one: states.update({one.steps: state(one.model)})])
    scripted(*lmls)
    one.fit(9)
    assert one.restore_best() == max(lml for lml in lmls if lml == lml)
    assert one.best.step == 2 * best
    assert same(state(one.model), states[2 * best])
    different = [name for name in states[9] if not torch.equal(states[9][name], states[2 * best][name])]
    assert {"0.probability.raw", "1.weight", "1.bias"} <= set(different)


def test_nothing_is_restored_where_nothing_was_kept():
    with pytest.raises(ValueError, match="keep_best=True"):
        trainer().restore_best()
    with pytest.raises(ValueError, match="no state has been kept"):
        trainer(keep_best=True).restore_best()


@pytest.mark.parametrize(
    ("lmls", "patience", "evaluations"),
    [
        ([-5, -6, -7, -8, -9], 3, 4),
        ([-5, -5, -5, -5], 2, 3),  # equal is no improvement
        ([-5, NAN, -6, -1], 2, 3),
        ([NAN, -5, NAN, -4, NAN, NAN, -1], 2, 6),
        ([-math.inf, -math.inf, -1], 2, 2),
    ],
)
def test_fit_ends_after_so_many_evaluations_without_a_higher_lml(lmls, patience, evaluations, scripted):
    scripted(*lmls)
    one = trainer(lml_every=2, patience=patience)
    one.fit(50)
    assert one.steps == 2 * evaluations and len(one.history.lml["lml"]) == evaluations
    assert one.exhausted
    one.fit(50)
    assert one.steps == 2 * evaluations
