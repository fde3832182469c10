"""Callbacks run after each step, in order; their results are recorded, and their random draws change nothing."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import partnets
from partnets import hyper
from partnets.evaluation.metrics import accuracy
from partnets.training.callbacks import every

PROPORTIONS = (0.5, 0.3, 0.2)


def trainer(**arguments):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=generator)
    mask = hyper.InputMask(4, temperature=0.5)
    model = partnets.partition(nn.Sequential(mask, nn.Dropout(0.2), nn.Linear(4, 3)), PROPORTIONS)
    chunks = partnets.chunk((x, x[:, :3].argmax(1)), PROPORTIONS)
    return partnets.Trainer(model, chunks, hyper=mask, batch_size=16, **arguments)


def test_callbacks_are_called_in_order_after_each_recorded_step():
    calls = []

    def callback(name):
        return lambda one: calls.append((name, one.steps, len(one.history.steps["loss"]), len(one.history.lml["lml"])))

    trainer(callbacks=[callback("first"), callback("second")], lml_every=1).fit(3)
    assert calls == [(name, step, step, step) for step in (1, 2, 3) for name in ("first", "second")]


def test_values_that_callbacks_return_are_recorded_with_their_step():
    squares = every(2, lambda one: {"square": one.steps**2, "half": torch.tensor(one.steps / 2)})
    history = trainer(callbacks=[squares, every(3, lambda one: {"cube": one.steps**3}), lambda one: {}]).fit(6)
    assert history.metrics == {
        "square": {"step": [2, 4, 6], "value": [4.0, 16.0, 36.0]},
        "half": {"step": [2, 4, 6], "value": [1.0, 2.0, 3.0]},
        "cube": {"step": [3, 6], "value": [27.0, 216.0]},
    }


def reseeds(one):
    torch.manual_seed(one.steps)
    return {"draw": torch.rand(()).item()}


def evaluates(one):
    return {"accuracy": accuracy(one.model, one.chunks[1], batch_size=7)}


def draws_elsewhere(one):
    return {"python": random.random(), "numpy": np.random.rand()}


@pytest.mark.full
@pytest.mark.parametrize(
    "callback",
    [lambda one: {"draw": torch.randn(7).mean()}, reseeds, evaluates, draws_elsewhere],
)
def test_callbacks_change_no_bit_of_the_training(callback):
    runs = []
    for callbacks in ([], [callback], [every(2, callback), callback]):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        one = trainer(callbacks=callbacks)
        one.fit(8)
        after = torch.tensor([random.random(), np.random.rand()])
        runs.append([*one.model.parameters(), one.generator.get_state(), torch.get_rng_state(), after])
        assert one.history.steps["step"] == list(range(1, 9))
    assert all(map(torch.equal, runs[0], runs[1])) and all(map(torch.equal, runs[0], runs[2]))


@pytest.mark.parametrize("returned", [0.9, {"a": "high"}])
def test_callbacks_that_return_no_dict_of_numbers_raise(returned):
    with pytest.raises(TypeError, match=r"pass a (dict from names to floats|float for each name)"):
        trainer(callbacks=[lambda one: returned]).fit(1)


def test_a_callback_that_raises_ends_the_training_after_its_step():
    def fails(one):
        if one.steps == 2:
            torch.rand(3)
            raise RuntimeError("full disk")

    one = trainer(callbacks=[fails])
    with pytest.raises(RuntimeError, match="full disk"):
        one.fit(5)
    assert one.steps == 2
