"""Unrolled steps of ψ: gradients match those of real steps of the weights, and the weights are unchanged."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from pairwise import pairwise
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import partnets
from partnets import hyper, optim
from partnets.training.unrolled import InnerSteps, leaving_nothing

PROPORTIONS = (0.5, 0.25, 0.25)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attention = nn.Linear(6, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.hidden, self.last = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.embed(x)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.last(torch.tanh(self.hidden(x.mean(1))))


NETWORKS = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), (6,)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(72, 3)), (2, 5, 5)),
    "group norm": (lambda: nn.Sequential(nn.Linear(6, 16), nn.GroupNorm(4, 16), nn.GELU(), nn.Linear(16, 3)), (6,)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3)), (6,)),
    "attention": (Attending, (4, 6)),
    "weight norm": (lambda: nn.Sequential(weight_norm(nn.Linear(6, 8)), nn.Tanh(), weight_norm(nn.Linear(8, 3))), (6,)),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3)), (6,)),
}
OPTIMIZERS = {
    "SGD": lambda model: optim.SGD(model, lr=0.1),
    "momentum": lambda model: optim.SGD(model, lr=0.1, momentum=0.9, nesterov=True, weight_decay=(0.01, 0.02, 0.03)),
    "Adam": lambda model: optim.Adam(model, lr=0.01, weight_decay=0.01, eps=1e-4),
    "AdamW": lambda model: optim.AdamW(model, lr=0.01, eps=1e-4),
    "RMSprop": lambda model: optim.PerPartition(torch.optim.RMSprop, model, lr=0.01, eps=1e-4),
}


class Tuned(nn.Module):
    """A network with label smoothing, weight decay and a temperature that also affects predictions."""

    def __init__(self, network):
        super().__init__()
        self.network, self.smoothing = network, hyper.LabelSmoothing(0.2)
        self.decay, self.temperature = hyper.WeightDecay(network, 0.03), Temperature()

    def forward(self, x):
        return self.temperature(self.decay(self.network(x)))

    def learn(self, batch):
        return self.smoothing(self(batch[0]), batch[1]).mean()

    def judge(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])

    def psi(self):
        return [self.smoothing.smoothing.raw, self.decay.decay.raw, self.temperature.temperature.raw]


class Detaching(hyper.SourceWeights):
    detaches = True


class Temperature(hyper.Hyperparameter):
    def __init__(self):
        super().__init__()
        self.temperature = hyper.Learned(1.5, hyper.positive)

    def forward(self, x):
        return x / self.temperature()


def tuned(network, scheme, optimizer, steps=2):
    """Return a briefly trained partitioned model in float64, its optimiser, and batches."""
    make, shape = NETWORKS[network]
    torch.manual_seed(0)
    x, y = torch.randn(5, 9, *shape, dtype=torch.float64), torch.randint(3, (5, 9))
    model = Tuned(make()).double()
    example = {"example": x[0]} if scheme == "nested" else {}
    partnets.partition(model, PROPORTIONS, scheme=scheme, **example)
    own, batches = OPTIMIZERS[optimizer](model), list(zip(x, y, strict=True))
    for _ in range(steps):
        for k in (1, 2, 3):
            partnets.step_weights(model, own, k, batches[0], model.learn)
    return model, own, batches


def judged_after(model, optimizer, batches, k, clip=None):
    """Return the loss on the last batch after real steps of w_k on the others, with the same noise."""
    model, optimizer = copy.deepcopy((model, optimizer))
    torch.manual_seed(7)
    for batch in batches[:-1]:
        partnets.step_weights(model, optimizer, k, batch, model.learn, clip=clip)
    model.smoothing.eval()
    model.decay.eval()
    with partnets.subnetwork(model, k, k), torch.no_grad():
        return model.judge(batches[-1]).item()


def ahead(model, optimizer, batches, k, exact, psi=None, clip=None):
    """Return the loss and its gradient by ψ, through unrolled steps of w_k and through the forward pass."""
    psi = model.psi() if psi is None else psi
    torch.manual_seed(7)
    with leaving_nothing(model):
        inner = InnerSteps(model, optimizer, k, model.learn, psi, exact, clip)
        for batch in batches[:-1]:
            inner.step(batch)
        value, by_weights, direct = inner.judged(batches[-1], model.judge, psi, [model.smoothing, model.decay])
        through = inner.back(by_weights)
    zeros = [torch.zeros_like(parameter) for parameter in psi]
    sums = [sum(one for one in pair if one is not None) for pair in zip(zeros, through, direct, strict=True)]
    return value.item(), torch.stack(sums)


def everything(model, optimizer):
    """Return everything that a step might change."""
    states = {f"{i}": state for i, state in optimizer.state_dict()["state"].items()}
    return copy.deepcopy({**model.state_dict(), **states}), [p.grad for p in model.parameters()], model.training


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.cases(usual=4)
@pairwise(
    network=NETWORKS.keys(),
    scheme=["weight", "nested"],
    optimizer=OPTIMIZERS.keys(),
    steps=[1, 3],
    exact=[True, False],
    k=[1, 2],
    clip=[None, 0.05],
)
def test_the_gradient_is_that_of_real_steps(network, scheme, optimizer, steps, exact, k, clip):
    scheme = "weight" if network == "weight norm" else scheme  # not supported by nested partitions
    model, own, batches = tuned(network, scheme, optimizer)
    batches = [*batches[1 : steps + 1], batches[-1]]
    before = everything(model, own)
    value, gradient = ahead(model, own, batches, k, exact, clip=clip)
    assert same(before, everything(model, own))
    torch.testing.assert_close(value, judged_after(model, own, batches, k, clip), rtol=1e-6, atol=1e-9)
    expected, move = [], 1e-4
    for raw in model.psi():
        found = []
        for sign in (1, -1):
            with torch.no_grad():
                raw.add_(sign * move)
            found.append(judged_after(model, own, batches, k, clip))
            with torch.no_grad():
                raw.sub_(sign * move)
        expected.append((found[0] - found[1]) / (2 * move))
    expected = torch.tensor(expected)
    tolerance = 1e-6 if exact else 1e-5
    assert (gradient - expected).abs().max() <= tolerance * expected.abs().max() + 1e-9


def test_an_implicit_gradient_is_that_of_the_minimum():
    """Compare with ridge regression, in which the minimum of the training loss is known for each decay."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 30, 4, dtype=torch.float64), torch.randn(2, 30, 1, dtype=torch.float64)
    layer = nn.Linear(4, 1, bias=False)
    model = nn.Sequential(layer, hyper.WeightDecay(layer, 0.3)).double()
    partnets.partition(model, (0.5, 0.5), defaults="zero")
    decay, mask = model[1].decay.raw, partnets.partitions(model)["0.weight"].mask(1)[0]

    def best(strength):
        mine = x[0][:, mask]
        gram = 2 * mine.T @ mine / len(mine) + strength * torch.eye(int(mask.sum()), dtype=torch.float64)
        return torch.linalg.solve(gram, 2 * mine.T @ y[0] / len(mine))

    def loss(batch):
        return F.mse_loss(model(batch[0]), batch[1])

    strength = model[1].decay()
    expected = torch.autograd.grad(F.mse_loss(x[1][:, mask] @ best(strength), y[1]), decay)[0]
    with torch.no_grad():
        model[0].weight[:, mask] = best(strength).T
    batches = {2: ((x[1], y[1]), [(x[0], y[0])])}
    for method in (
        partnets.Implicit("conjugate_gradients", terms=4),
        partnets.Implicit("neumann", terms=400, alpha=0.2),
    ):
        step_of_psi = torch.optim.SGD([decay], lr=0.0)
        partnets.step_lookahead(model, optim.SGD(model), step_of_psi, batches, loss, loss, by=method)
        torch.testing.assert_close(decay.grad, expected, rtol=1e-6, atol=0)
    for terms in (4, 400):  # which overflows
        method = partnets.Implicit("neumann", terms=terms, alpha=1e3)
        with pytest.raises(ArithmeticError, match="the Neumann series grows"):
            partnets.step_lookahead(model, optim.SGD(model), step_of_psi, batches, loss, loss, by=method)


def test_direct_hyperparameters_have_direct_gradients_in_a_lookahead_step():
    model, own, batches = tuned("linear", "weight", "Adam")
    raws = model.psi()
    gradient = ahead(model, own, [batches[0], batches[-1]], 1, True, raws)[1]
    alone = torch.optim.SGD(raws[2:], lr=0.0)
    value = partnets.step_hyper(model, alone, {2: batches[-1]}, model.judge)
    expected = raws[2].grad.clone()
    by = {model.temperature: "direct"}
    given = {2: (batches[-1], [batches[0]])}
    step_of_psi = torch.optim.SGD(raws, lr=0.0)
    found = partnets.step_lookahead(model, own, step_of_psi, given, model.learn, model.judge, by=by)
    assert torch.equal(found, value) and torch.equal(raws[2].grad, expected)
    torch.testing.assert_close(torch.stack([raw.grad for raw in raws[:2]]), gradient[:2])


def test_gradients_of_several_chunks_are_weighted():
    model, own, batches = tuned("linear", "nested", "SGD")
    raws = model.psi()[:2]
    found = [ahead(model, own, [batches[0], batches[-1]], k, True, raws) for k in (1, 2)]
    step_of_psi = torch.optim.SGD(raws, lr=0.0)
    given = {k: (batches[-1], [batches[0]]) for k in (2, 3)}
    value = partnets.step_lookahead(
        model, own, step_of_psi, given, model.learn, model.judge, weights={2: 0.25, 3: 0.75}
    )
    assert value.item() == pytest.approx(0.25 * found[0][0] + 0.75 * found[1][0])
    torch.testing.assert_close(torch.stack([r.grad for r in raws]), 0.25 * found[0][1] + 0.75 * found[1][1])


def trained(steps=6, workers=0, **options):
    torch.manual_seed(0)
    x = torch.randn(120, 6)
    chunks = partnets.chunk((x, (x[:, 0] > 0).long()), PROPORTIONS)
    model = Tuned(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    partnets.partition(model, PROPORTIONS, seed=0)
    psi = [model.smoothing, model.decay, model.temperature]
    options = {"hyper": psi, "loss": model.smoothing, "batch_size": 16, "num_workers": workers} | options
    trainer = partnets.Trainer(model, chunks, **options)
    trainer.hyper_optimizer.param_groups[0]["lr"] = 0.05
    trainer.fit(steps)
    return trainer


@pytest.mark.full
def test_a_trainer_uses_lookahead_only_for_training_only_hyperparameters():
    trainer = trained(30)
    assert trainer.hyper_gradient == {
        "smoothing": partnets.Lookahead(), "decay": partnets.Lookahead(), "temperature": None
    }  # fmt: skip
    values = trainer.history.values
    assert values.keys() == {"smoothing.smoothing", "decay.decay", "temperature.temperature"}
    assert all(found[0] != found[-1] for found in values.values())


@pytest.mark.full
@pytest.mark.parametrize("given", [None, "lookahead", "implicit", partnets.Lookahead(2, exact=False)], ids=str)
def test_a_trainer_resumes_to_the_same_bits(given, tmp_path):
    whole, half = trained(6, hyper_gradient=given), trained(3, hyper_gradient=given)
    half.save(tmp_path / "half.pt")
    other = trained(0, hyper_gradient=given)
    other.load(tmp_path / "half.pt")
    torch.manual_seed(0)
    other.fit(3)
    assert same(whole.model.state_dict(), other.model.state_dict())
    with pytest.raises(ValueError, match="hyper_gradient"):
        trained(0, hyper_gradient=partnets.Lookahead(7)).load(tmp_path / "half.pt")


@pytest.mark.full
def test_batches_that_are_fetched_ahead_are_the_same():
    assert same(trained(4).model.state_dict(), trained(4, workers=1).model.state_dict())


@pytest.mark.full
def test_lookahead_trains_with_one_pass():
    trainer = trained(3, one_pass=True, batch_size=64)
    assert trainer.history.steps["hyper_loss"][-1] > 0


def test_a_direct_step_refuses_label_smoothing():
    """Check that evaluation ignores the smoothing, which would otherwise just minimise its own loss."""
    smoothing = hyper.LabelSmoothing(0.2)
    model = partnets.partition(nn.Sequential(nn.Linear(4, 3), smoothing), (0.5, 0.5))
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    step_of_psi = torch.optim.SGD(smoothing.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"1\.smoothing\.raw no gradient.* partnets\.step_lookahead"):
        partnets.step_hyper(model, step_of_psi, {2: (x, y)}, lambda batch: smoothing(model(batch[0]), batch[1]).mean())
    assert smoothing.training and smoothing.values()["smoothing"] == pytest.approx(0.2)


def test_a_federation_refuses_hyperparameters_that_need_lookahead():
    smoothing = hyper.LabelSmoothing(0.2)
    model = partnets.partition(nn.Sequential(nn.Linear(4, 3), smoothing), (0.5, 0.5))
    chunks = partnets.chunk((torch.randn(20, 4), torch.randint(3, (20,))), (0.5, 0.5))
    for make in (
        lambda: partnets.federated.Server(model, hyper=smoothing),
        lambda: partnets.federated.Client(model, chunks[1], chunk=1, number=0, hyper=smoothing),
    ):
        with pytest.raises(ValueError, match=r"1 \(LabelSmoothing\) acts only in training, but in a federation"):
            make()


class Checkpointed(Tuned):
    """A model with activation checkpoints, which recompute in the backward pass."""

    def forward(self, x):
        return self.temperature(self.decay(checkpoint(self.network, x, use_reentrant=False)))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("steps", [1, 2])
def test_activation_checkpoints_compute_with_the_weights_of_the_step(exact, steps):
    model, own, batches = tuned("group norm", "weight", "Adam")
    batches = [*batches[:steps], batches[-1]]
    expected = ahead(model, own, batches, 2, exact)
    model.__class__ = Checkpointed
    value, gradient = ahead(model, own, batches, 2, exact)
    assert value == pytest.approx(expected[0], rel=1e-12)
    torch.testing.assert_close(gradient, expected[1], rtol=1e-9, atol=1e-12)
    implicit = partnets.Implicit(terms=2, alpha=1e-3)
    found = []
    for kind in (Tuned, Checkpointed):
        model.__class__ = kind
        step_of_psi = torch.optim.SGD(model.psi(), lr=0.0)
        given = {3: (batches[-1], [batches[0]])}
        partnets.step_lookahead(model, own, step_of_psi, given, model.learn, model.judge, by=implicit)
        found.append(torch.stack([raw.grad for raw in model.psi()]))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_a_hyperparameter_that_two_modules_share_is_counted_once():
    model, own, batches = tuned("linear", "weight", "SGD")
    expected = ahead(model, own, [batches[0], batches[-1]], 1, True, [model.decay.decay.raw])[1]
    model.also = hyper.LabelSmoothing(0.1)
    model.also.smoothing = model.decay.decay
    step_of_psi = torch.optim.SGD([model.decay.decay.raw], lr=0.0)
    given = {2: (batches[-1], [batches[0]])}
    partnets.step_lookahead(model, own, step_of_psi, given, model.learn, model.judge)
    torch.testing.assert_close(model.decay.decay.raw.grad[None], expected)


class Centred(nn.Module):
    """A module that subtracts the running mean of previous batches."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        y = (x - self.mean.clone()) * self.scale
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return y


def test_differences_begin_at_the_state_that_a_step_began_at():
    torch.manual_seed(0)
    model = Tuned(nn.Sequential(nn.Linear(6, 8), Centred(), nn.Tanh(), nn.Linear(8, 3))).double()
    x, y = torch.randn(3, 9, 6, dtype=torch.float64), torch.randint(3, (3, 9))
    partnets.partition(model, PROPORTIONS, stateful=["network.1"])
    batches, own = list(zip(x, y, strict=True)), optim.SGD(model, lr=0.1)
    exact, differences = (ahead(model, own, batches, 1, exact)[1] for exact in (True, False))
    torch.testing.assert_close(differences, exact, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("still", [0, 2])
def test_layers_may_be_frozen_after_the_partition(still):
    model, own, batches = tuned("linear", "weight", "Adam")
    model.network[still].requires_grad_(False)
    exact, differences = (ahead(model, own, batches[:3], 1, exact)[1] for exact in (True, False))
    torch.testing.assert_close(differences, exact, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("exact", [True, False])
def test_a_penalty_may_hold_the_parameters_themselves(exact):
    model, own, batches = tuned("linear", "weight", "Adam")
    batches = batches[:3]
    expected = ahead(model, own, batches, 3, exact)
    held = [model.network[0].weight, model.network[2].weight]  # fully active in the last subnetwork
    model.decay.penalty = lambda x: model.decay.decay() * sum(parameter.square().sum() for parameter in held) / 2
    value, gradient = ahead(model, own, batches, 3, exact)
    assert value == pytest.approx(expected[0], rel=1e-9)
    torch.testing.assert_close(gradient, expected[1], rtol=1e-6, atol=1e-10)


def test_rates_of_0_and_of_layers_that_a_batch_leaves_out_have_a_gradient_of_0():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
            self.rate = hyper.LearningRate(self.second, 0.01)

        def forward(self, x):
            return self.last(self.first(x).tanh())  # does not use self.second

    model = partnets.partition(Dropped(), PROPORTIONS)
    x, y = torch.randn(9, 6), torch.randint(3, (9,))

    def loss(batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    step_of_psi, given = torch.optim.SGD(model.rate.parameters(), lr=0.1), {2: ((x, y), [(x, y)])}
    partnets.step_lookahead(model, optim.SGD(model), step_of_psi, given, loss, loss)
    assert model.rate.rate.raw.grad == 0
    model.rate.of = [model.first]
    optimizer = optim.SGD(model, lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step)
    partnets.step_lookahead(model, optimizer, step_of_psi, given, loss, loss)
    assert model.rate.rate.raw.grad != 0
    optimizer.zero_grad()
    with partnets.subnetwork(model, 1, 1):
        loss((x, y)).backward()
    optimizer.step(update=1)
    schedule.step()
    partnets.step_lookahead(model, optimizer, step_of_psi, given, loss, loss)
    assert model.rate.rate.raw.grad == 0


def with_a_rate(make=optim.Adam):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model = partnets.partition(nn.Sequential(hyper.LearningRate(network, 0.05), network), PROPORTIONS, seed=1)
    return model, make(model)


@pytest.mark.parametrize("make", [optim.Adam, lambda model: optim.PerPartition(torch.optim.NAdam, model)])
def test_a_loaded_optimiser_continues_with_learned_rates(make):
    x, y = torch.randn(9, 6), torch.randint(3, (9,))
    first, second = with_a_rate(make), with_a_rate(make)

    def step(model, optimizer):
        partnets.step_weights(model, optimizer, 1, (x, y), lambda batch: F.cross_entropy(model(batch[0]), batch[1]))

    step(*first)
    for loaded, saved in zip(second, first, strict=True):
        loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    for one in (first, second):
        step(*one)
    assert all(map(torch.equal, first[0].parameters(), second[0].parameters()))
    again = copy.deepcopy(second)
    for one in (second, again):
        step(*one)
    assert all(map(torch.equal, again[0].parameters(), second[0].parameters()))


def test_a_rate_that_is_learned_is_reduced_on_a_plateau_also_after_a_load():
    _, optimizer = with_a_rate(optim.SGD)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    for _ in range(3):
        schedule.step(1.0)
    model, loaded = with_a_rate(optim.SGD)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one in (optimizer, loaded, copy.deepcopy(optimizer)):
        group = one.param_groups[0]
        assert one.rate_to_follow(group["params"][0], group).item() == pytest.approx(0.05 * 0.01)
    before, x = model[1][2].bias_rows.clone(), torch.ones(1, 6)
    partnets.step_weights(model, loaded, 1, (x, None), lambda batch: model(batch[0]).sum())
    torch.testing.assert_close(before - model[1][2].bias_rows, torch.tensor([[5e-4], [0.0], [0.0]]).expand(3, 3))


def smoothed(loss_in_model=True):
    torch.manual_seed(0)
    network, smoothing = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), hyper.LabelSmoothing(0.2)
    model = partnets.partition(nn.Sequential(network, smoothing) if loss_in_model else network, PROPORTIONS)
    batch = torch.randn(6, 4), torch.randint(3, (6,))
    return model, smoothing, batch, lambda batch: smoothing(model(batch[0]), batch[1]).mean()


def test_a_gradient_of_psi_that_is_not_finite_raises_before_psi_is_stepped():
    class Rooted(hyper.TrainingLoss):
        def __init__(self):
            super().__init__()
            self.share = hyper.Learned(0.5, hyper.probability)

        def trained(self, output, y):
            return self.losses(output, y) * (1 + 0 * (self.share() * output[:, 0].detach() * 0).sqrt())

    rooted = Rooted()
    model = partnets.partition(nn.Sequential(nn.Linear(4, 3), rooted), PROPORTIONS)
    batch, of_psi = (torch.randn(6, 4), torch.randint(3, (6,))), torch.optim.SGD(rooted.parameters(), lr=1.0)

    def loss(batch):
        return rooted(model(batch[0]), batch[1]).mean()

    with pytest.raises(FloatingPointError, match=r"the gradient of 1\.share\.raw .* is not finite; ψ has not"):
        partnets.step_lookahead(model, optim.SGD(model, lr=0.1), of_psi, {2: (batch, [batch])}, loss, loss)
    assert rooted.values()["share"] == pytest.approx(0.5)


def test_finite_differences_ignore_embeddings_of_absent_words():
    """Check embeddings without gradients: Adam's step is steep for them and would dominate the finite difference."""
    torch.manual_seed(0)
    network, smoothing = (
        nn.Sequential(nn.Embedding(2000, 8), nn.Flatten(), nn.Tanh(), nn.Linear(32, 3)),
        hyper.LabelSmoothing(0.2),
    )
    model = partnets.partition(nn.Sequential(network, smoothing), PROPORTIONS)
    optimizer, of_psi = optim.Adam(model, lr=0.01), torch.optim.SGD(smoothing.parameters(), lr=0.0)
    batches = [(torch.randint(2000, (16, 4)), torch.randint(3, (16,))) for _ in range(8)]

    def loss(batch):
        return smoothing(model(batch[0]), batch[1]).mean()

    for batch in batches[2:]:
        partnets.step_weights(model, optimizer, 1, batch, loss)
    found = []
    for exact in (True, False):
        by = partnets.Lookahead(exact=exact)
        partnets.step_lookahead(model, optimizer, of_psi, {2: (batches[0], [batches[1]])}, loss, loss, by=by)
        found.append(smoothing.smoothing.raw.grad.item())
    assert found[1] == pytest.approx(found[0], rel=0.05)


def test_under_autocast_the_weights_of_the_step_are_those_that_are_judged():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    decay = hyper.WeightDecay(network, 0.1)
    data = torch.randn(60, 8), torch.randint(3, (60,))
    model, _ = partnets.held_out(nn.Sequential(network, decay), data, validation=0.5)
    of_psi, batch = torch.optim.SGD(decay.parameters(), lr=0.0), tuple(part[:30] for part in data)

    def loss(batch):
        return F.cross_entropy(model(batch[0]).float(), batch[1])

    found = []
    for outside in (True, False):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=outside):

            def compute(batch):
                with torch.autocast("cpu", torch.bfloat16):
                    return loss(batch)

            partnets.step_lookahead(model, optim.SGD(model, lr=1.0), of_psi, {2: (batch, [batch])}, compute, compute)
        found.append(decay.decay.raw.grad.item())
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch shows it to nobody
@pytest.mark.parametrize("whole", [True, False])
def test_exact_lookahead_through_compiled_modules_is_refused(whole):
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    smoothing = hyper.LabelSmoothing(0.2)
    model = partnets.partition(nn.Sequential(network, nn.Linear(8, 3), smoothing), (0.5, 0.5))
    if whole:
        model[0] = torch.compile(network, backend="eager")
    else:
        network.compile(backend="eager")
    x, y = torch.randn(9, 4), torch.randint(3, (9,))

    def loss(batch):
        return smoothing(model(batch[0]), batch[1]).mean()

    step_of_psi, given = torch.optim.SGD(smoothing.parameters(), lr=0.1), {2: ((x, y), [(x, y)])}
    with pytest.raises(ValueError, match=r"a part of the model is compiled, .* pass Lookahead\(exact=False\)"):
        partnets.step_lookahead(model, optim.SGD(model), step_of_psi, given, loss, loss)
    by = {smoothing: partnets.Lookahead(exact=False)}
    partnets.step_lookahead(model, optim.SGD(model), step_of_psi, given, loss, loss, by=by)


def draws_without_a_gradient():
    dropout = hyper.Dropout(0.3)
    model = partnets.partition(nn.Sequential(nn.Linear(4, 8), dropout, nn.Linear(8, 2)), (0.5, 0.5))
    batch = torch.randn(6, 4), torch.randint(2, (6,))
    return model, dropout, batch, lambda batch: F.cross_entropy(model(batch[0]), batch[1])


def in_half_precision():
    model = Tuned(nn.Linear(6, 3)).bfloat16()
    partnets.partition(model, PROPORTIONS)
    batch = torch.randn(4, 6, dtype=torch.bfloat16), torch.tensor([0, 1, 2, 0])
    return model, model.smoothing, batch, model.learn


def detaching():
    weights = Detaching(2)
    model = partnets.partition(nn.Sequential(nn.Linear(4, 3), weights), PROPORTIONS)
    return model, weights, (torch.randn(6, 4), torch.randint(3, (6,))), None


differences = partnets.Lookahead(exact=False)


@pytest.mark.parametrize(
    ("make", "by", "given", "error", "message"),
    [
        (draws_without_a_gradient, "lookahead", lambda b: {2: (b, [b])}, RuntimeError, r"1\.rate\.raw no gradient"),
        (smoothed, None, lambda b: {2: (b, [])}, ValueError, "0 batches of D_1:1, but 1 steps to look ahead"),
        (smoothed, None, lambda b: {2: (b, [b, b])}, ValueError, "2 batches of D_1:1, but 1 steps to look ahead"),
        (smoothed, None, lambda b: {}, ValueError, r"batches is a dict; pass \{k: a batch of D_k\}"),
        (smoothed, "ahead", lambda b: {2: (b, [b])}, ValueError, "hyper_gradient='ahead'"),
        (partial(smoothed, False), None, lambda b: {2: (b, [b])}, ValueError, "1 parameters that are not in the model"),
        (in_half_precision, differences, lambda b: {2: (b, [b])}, ValueError, "half precision are lost in rounding"),
        (
            detaching,
            differences,
            lambda b: {2: (b, [b])},
            ValueError,
            r"Detaching detaches the values.*exact=True",
        ),
    ],
)
def test_invalid_lookahead_steps_raise_and_leave_psi_unchanged(make, by, given, error, message):
    model, psi, batch, loss = make()
    before = copy.deepcopy([*psi.parameters()])
    of_psi = torch.optim.SGD(psi.parameters(), lr=1.0)
    with pytest.raises(error, match=message):
        partnets.step_lookahead(model, optim.Adam(model), of_psi, given(batch), loss, loss, by=by)
    assert same(before, [*psi.parameters()])


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
