"""Hyperparameters that act only in training are tuned to known optimal values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partnets
from partnets import hyper, optim

PROPORTIONS = (0.6, 0.2, 0.2)


@pytest.mark.full
@pytest.mark.parametrize("seed", [3])
def test_the_decay_of_ridge_regression_is_that_of_the_closed_form(seed):
    torch.manual_seed(seed)
    scales, true = torch.linspace(0.3, 1.5, 20).double(), torch.randn(20, 1).double()
    x = torch.randn(240, 20).double() * scales
    y = x @ true + 2 * torch.randn(240, 1).double()
    seen, unseen = (x[:120], y[:120]), (x[120:], y[120:])
    layer = nn.Linear(20, 1, bias=False)
    model = nn.Sequential(layer, hyper.WeightDecay(layer, 0.3, range=hyper.logarithmic(1e-4, 10))).double()
    partnets.partition(model, (1.0, 0.0), defaults="zero")
    optimizer, rates = optim.SGD(model, lr=0.15), torch.optim.Adam(model[1].parameters(), lr=0.1)
    falling = torch.optim.lr_scheduler.ExponentialLR(rates, 0.99)

    def loss(batch):
        return F.mse_loss(model(batch[0]), batch[1])

    for _ in range(400):
        for _ in range(5):
            partnets.step_weights(model, optimizer, 1, seen, loss)
        by = partnets.Implicit("conjugate_gradients", terms=20)
        partnets.step_lookahead(model, optimizer, rates, {2: (unseen, [seen])}, loss, loss, by=by)
        falling.step()

    def best(decay):
        gram = 2 * seen[0].T @ seen[0] / 120 + decay * torch.eye(20).double()
        return F.mse_loss(unseen[0] @ torch.linalg.solve(gram, 2 * seen[0].T @ seen[1] / 120), unseen[1])

    candidates = torch.logspace(-3, 1, 1000).double()
    expected = candidates[torch.stack([best(decay) for decay in candidates]).argmin()].item()
    assert model[1].values()["decay"] == pytest.approx(expected, rel=0.1)


@pytest.mark.full
def test_the_learning_rate_of_a_quadratic_leads_to_its_minimum():
    torch.manual_seed(0)
    x = torch.linalg.qr(torch.randn(12, 12))[0] * 12**0.5  # the Hessian is then 2 times the identity
    layer = nn.Linear(12, 1, bias=False)
    model = partnets.partition(nn.Sequential(layer, hyper.LearningRate(layer, 0.05)), (1.0, 0.0), defaults="zero")
    optimizer, rates = optim.SGD(model), torch.optim.Adam(model[1].parameters(), lr=0.05)

    def loss(batch):
        return F.mse_loss(model(batch[0]), batch[1])

    for _ in range(200):
        with torch.no_grad():
            model[0].weight.normal_()
        batch = x, torch.randn(12, 1)
        partnets.step_lookahead(model, optimizer, rates, {2: (batch, [batch])}, loss, loss)
    assert model[1].values()["rate"] == pytest.approx(0.5, rel=0.1)


def classes(noisy, seed=0):
    """Return points of two classes, their labels and a mask of random labels; and points and labels for testing."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4000, 8, generator=generator)
    y = (x[:, 0] + x[:, 1] > 0).long()
    random = torch.rand(1000, generator=generator) < noisy
    labels = torch.where(random, torch.randint(2, (1000,), generator=generator), y[:1000])
    return (x[:1000], labels, random), (x[1000:], y[1000:])


def trained(loss, examples, hyper_loss=None, psi=(), lr=0.1, steps=400):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    model = nn.Sequential(network, loss) if psi else network
    partnets.partition(model, PROPORTIONS, seed=0)
    rates = torch.optim.Adam([p for module in psi for p in module.parameters()], lr=lr) if psi else None
    trainer = partnets.Trainer(
        model, partnets.chunk(examples, PROPORTIONS), hyper=list(psi), loss=loss, hyper_loss=hyper_loss,
        optimizer=optim.Adam(model, lr=1e-2), hyper_optimizer=rates, batch_size=64, audit=False,
    )  # fmt: skip
    trainer.fit(steps)
    return model


@pytest.mark.full
def test_a_source_of_random_labels_counts_for_nothing():
    (x, y, random), test = classes(0.5)
    examples = [(x[i], (y[i], random[i].long())) for i in range(len(x))]
    weights = hyper.SourceWeights(("clean", "random"))
    model = trained(weights, examples, lambda output, y: hyper.expected_error(output, y[0]), [weights], 0.2, 800)
    found = weights.values()
    assert found["random"] < 0.1 * found["clean"]
    without = trained(F.cross_entropy, (x[~random], y[~random]), steps=800)
    assert partnets.accuracy(model, test) > partnets.accuracy(without, test) - 0.01


@pytest.mark.full
def test_labels_that_are_wrong_are_smoothed_and_others_are_not():
    found = {}
    for noisy in (0.0, 0.6):
        (x, y, _), _ = classes(noisy)
        smoothing = hyper.LabelSmoothing(0.1)
        trained(smoothing, (x, y), psi=[smoothing], lr=0.05)
        found[noisy] = smoothing.values()["smoothing"]
    assert found[0.0] < 0.05 and found[0.6] > 0.15


@pytest.mark.full
def test_examples_with_wrong_labels_weigh_less():
    (x, y, _), test = classes(0.6)
    examples = [(x[i], (y[i], torch.tensor(i))) for i in range(len(x))]
    weights = hyper.ExampleWeights(len(x))
    chunked = partnets.chunk(examples, PROPORTIONS)
    model = trained(weights, examples, lambda output, y: hyper.expected_error(output, y[0]), [weights], lr=0.3)
    judged = torch.tensor([i for k in (1, 2) for i in chunked.indices(k)])  # the last chunk trains only w_3
    wrong = (y != (x[:, 0] + x[:, 1] > 0).long())[judged]
    found = weights.scores.detach().sigmoid()[judged]
    assert found[wrong].mean() < 0.5 * found[~wrong].mean()
    plain = trained(F.cross_entropy, (x, y))
    assert partnets.accuracy(model, test) > partnets.accuracy(plain, test) + 0.02
