"""The temperature at which a classifier is evaluated on unseen data while widths of augmentations learn."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partnets
from partnets import hyper
from partnets.tuning.temperature import SPREAD, TEMPERATURES, best

OPTIONS = {"steps": 100, "batch_size": 32, "optimizer": functools.partial(torch.optim.Adam, lr=0.01)}


def noisy():
    """Return images with a third of the labels random, so that a network that fits them is overconfident."""
    torch.manual_seed(0)
    x = torch.rand(200, 1, 6, 6)
    y = x[:, 0, :2, 0].argmax(1)
    return x, torch.where(torch.rand(200) < 1 / 3, torch.randint(2, (200,)), y)


def network(*shape):
    torch.manual_seed(1)
    layers = nn.Flatten(), nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, math.prod(shape))
    return nn.Sequential(*layers, nn.Unflatten(1, shape))


def losses_of(kind):
    """Return a network, data, and a function that sums the losses of outputs."""
    x, y = noisy()
    if kind == "tokens":
        loss = lambda output, y: F.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="sum")  # noqa: E731
        return network(5, 3), (x, y[:, None].repeat(1, 5)), loss
    if kind == "several labels":
        y = F.one_hot(y).float()
        return network(2), (x, y), functools.partial(F.binary_cross_entropy_with_logits, reduction="sum")
    return network(2), (x, y), functools.partial(F.cross_entropy, reduction="sum")


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("kind", ["classes", "several labels", "tokens"])
def test_unseen_data_judge_at_the_best_temperature_where_widths_learn(kind):
    model, data, loss = losses_of(kind)
    grid, seen = torch.linspace(0, math.log(4), 1001).exp().tolist(), []

    def watch(training):
        if training.direct:
            x, y = training.chunks[2][:]
            with torch.no_grad():
                logits = training.network.eval()[1:](x)  # without the augmentation
            seen.append((logits, y, training.judged[-1], training.temperature))

    result = partnets.tune(model, data, hyper.Affine(), **OPTIONS, callbacks=[watch])
    for logits, y, nats, temperature in seen:
        found = [float(loss(logits / t, y)) + math.log(t) ** 2 / (2 * SPREAD**2) for t in grid]
        assert nats == pytest.approx(min(found), rel=1e-3)
        assert temperature == pytest.approx(grid[found.index(min(found))], rel=0.03)
    assert len(seen) == 10 and max(temperature for *_, temperature in seen) > 1.3
    assert -result.lml in [nats for _, _, nats, _ in seen]


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize(
    ("tuned", "loss"),
    [
        ("weight_decay", F.cross_entropy),
        (hyper.InputMask(36), F.cross_entropy),
        (hyper.Affine(), lambda output, y: F.cross_entropy(output, y)),
        (hyper.Affine(), lambda output, y: F.mse_loss(output, F.one_hot(y).float())),
    ],
    ids=["number", "mask", "own", "own squared"],
)
def test_other_trainings_are_judged_as_they_are(tuned, loss):
    """Check temperature 1 without augmentations, where overconfidence must count, and with custom losses."""
    x, y = noisy()
    x = x.flatten(1) if isinstance(tuned, hyper.InputMask) else x
    temperatures = []
    callbacks = [lambda training: temperatures.append(training.temperature)]
    partnets.tune(network(2), (x, y), tuned, loss=loss, **OPTIONS | {"steps": 20}, callbacks=callbacks)
    assert set(temperatures) == {1.0}


def test_widths_learn_from_logits_at_the_temperature_of_the_last_judgement(monkeypatch):
    used, judged = [], []
    callbacks = [lambda training: judged.extend([training.temperature] * bool(training.direct))]
    tuned = functools.partial(partnets.tune, network(2), noisy(), hyper.Affine(), **OPTIONS)
    monkeypatch.setattr("partnets.tuning.training.divided", lambda output, t: used.append(t) or output)
    undivided = tuned(callbacks=callbacks)
    # Widths learn in each step from step 25 on; evaluations follow each tenth.
    assert used[-75:] == [judged[step // 10 - 1] for step in range(25, 100)] and max(used) > 1.3
    monkeypatch.undo()
    assert tuned().schedule != undivided.schedule


@pytest.mark.parametrize(
    ("nats", "value", "temperature"),
    [
        ([10.0, 11.0, 12.0, 13.0, 14.0], 10.0, 1.0),
        ([2.0, 2.0, math.nan, 2.0, 2.0], 2.0, 1.0),
        ([1e6, 8e5, 6e5, 4e5, 2e5], 2e5 + math.log(4) ** 2 / (2 * SPREAD**2), 4.0),
        # A parabola in log T, like the prior.
        ([(math.log(t) - 1.0) ** 2 * 50 for t in TEMPERATURES], 50 * 2 / 52, math.exp(50 / 52)),
    ],
)
def test_the_best_temperature_is_at_least_one_and_at_most_four(nats, value, temperature):
    assert best(nats) == pytest.approx((value, temperature), rel=2e-3)
