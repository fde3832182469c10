"""Hyperparameters that act only in training: gradients match real steps, values have units, evaluation ignores them."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partnets
from partnets import hyper, optim
from partnets.utils.losses import mean

PROPORTIONS = (0.5, 0.25, 0.25)


class Model(nn.Module):
    """A network with a module before it and a training loss after it."""

    def __init__(self, loss=None, front=None):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.front = nn.Identity() if front is None else front
        self.loss = nn.Identity() if loss is None else loss

    def forward(self, x):
        return self.loss(self.network(self.front(x)))


def with_two(kind, first, second):
    """Return a model with a learning rate or weight decay for each of its layers."""
    model = Model()
    model.front, model.loss = kind(model.network[0], first), kind(model.network[2], second)
    return model


CASES = {
    "learning rates": (lambda: with_two(hyper.LearningRate, 0.1, 0.2), None),
    "weight decays": (lambda: with_two(hyper.WeightDecay, 0.1, 0.02), None),
    "label smoothing": (lambda: Model(hyper.LabelSmoothing(0.2)), "loss"),
    "source weights": (lambda: Model(hyper.SourceWeights(("clean", "noisy"))), "loss"),
    "noise in training": (lambda: Model(front=hyper.InTraining(hyper.InputNoise(0.3))), None),
    "mixup": (lambda: Model(front=hyper.Mixup(0.7)), "front"),
}


def made(name):
    """Return a partitioned model in float64, and two batches (x, y)."""
    torch.manual_seed(0)
    model = CASES[name][0]().double()
    partnets.partition(model, PROPORTIONS)
    x, y, sources = torch.randn(2, 20, 6, dtype=torch.float64), torch.randint(3, (2, 20)), torch.randint(2, (2, 20))
    targets = zip(y, sources, strict=True) if name == "source weights" else y
    return model, [*zip(x, targets, strict=True)]


def losses_of(model, name):
    """Return a model's training loss and its evaluation loss as functions of a batch."""
    where = CASES[name][1]
    own = None if where is None else getattr(model, where)
    train = F.cross_entropy if own is None else own.loss if where == "front" else own
    judge = getattr(own, "plain", F.cross_entropy)

    def of(loss):
        return lambda batch: mean(loss, model(batch[0]), batch[1])

    return of(train), of(judge)


class Drawn:
    """A stand-in for Beta with draws that are smooth in alpha; with a fixed seed, those of Beta jump."""

    def __init__(self, alpha, _):
        self.alpha = alpha

    def rsample(self):
        return torch.rand(()) * self.alpha.sigmoid()


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_a_real_step(name, adam, monkeypatch):
    monkeypatch.setattr("partnets.hyper.mixup.Beta", Drawn)
    model, batches = made(name)
    own = optim.Adam(model, lr=0.01, eps=1e-3) if adam else optim.SGD(model)
    learn, judge = losses_of(model, name)
    partnets.step_weights(model, own, 1, batches[0], learn)
    psi = hyper.hyperparameters(model)

    def after():
        other, its = copy.deepcopy((model, own))
        torch.manual_seed(3)
        learn, judge = losses_of(other, name)
        partnets.step_weights(other, its, 1, batches[0], learn)
        other.eval()
        with partnets.subnetwork(other, 1), torch.no_grad():
            return judge(batches[1])

    torch.manual_seed(3)
    still = torch.optim.SGD(psi, lr=0.0)
    given = {2: (batches[1], [batches[0]])}
    value = partnets.step_lookahead(model, own, still, given, learn, judge)
    torch.testing.assert_close(value, after(), rtol=1e-7, atol=0)
    largest = max(parameter.grad.abs().max() for parameter in psi)
    for parameter in psi:
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        for i in range(0, len(flat), 7):  # every 7th of many
            here, found = flat[i].item(), {}
            for move in (-2, -1, 1, 2):
                flat[i] = here + 1e-3 * move
                found[move] = after()
            flat[i] = here
            expected = (8 * (found[1] - found[-1]) - (found[2] - found[-2])) / 12e-3
            assert abs(gradient[i] - expected) <= 1e-6 * largest + 1e-10


def test_weights_have_a_mean_of_1_and_only_their_ratios_matter():
    weights = hyper.SourceWeights(("books", "web", "code"))
    weights.weights.assign([2.0, 4.0, 6.0])
    assert weights.values() == pytest.approx({"books": 0.5, "web": 1.0, "code": 1.5})
    logits, y, source = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0]), torch.tensor([0, 1, 2, 2, 0])
    found = weights(logits, (y, source))
    weights.weights.assign([20.0, 40.0, 60.0])
    torch.testing.assert_close(found, weights(logits, (y, source)))
    shares = torch.tensor([0.5, 1.0, 1.5])[source]
    torch.testing.assert_close(found, F.cross_entropy(logits, y, reduction="none") * shares / shares.mean())


def test_weights_of_a_batch_of_several_subnetworks_are_refused():
    weights, y = hyper.SourceWeights(2), torch.tensor([0, 1, 2])
    targets = y, torch.zeros(3, dtype=torch.long)
    model, which = partnets.partition(nn.Linear(4, 3), (0.5, 0.5)), torch.tensor([1, 2, 2])
    with partnets.subnetwork(model, active=which, update=which):
        logits = model(torch.randn(3, 4))
        with pytest.raises(RuntimeError, match="its examples are of several subnetworks"):
            weights(logits, targets)
    assert weights(logits, targets).isfinite().all()


def test_held_out_data_are_judged_without_label_smoothing_of_the_inner_loss():
    smoothed, logits, y = nn.CrossEntropyLoss(label_smoothing=0.2), torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    sources, mixup = hyper.SourceWeights(2, smoothed), hyper.Mixup(loss=smoothed)
    judged = sources.plain(logits, (y, torch.zeros(4, dtype=torch.long))), mixup.eval().loss(logits, y)
    assert torch.equal(judged[0], F.cross_entropy(logits, y, reduction="none"))
    assert torch.equal(judged[1], F.cross_entropy(logits, y))
    mixup.train()(logits)
    assert mixup.loss(logits, y) > 0


def test_the_loss_of_an_example_is_the_mean_of_its_targets_without_ignored_ones():
    weights = hyper.SourceWeights(2)
    logits, y = torch.randn(2, 3, 4), torch.tensor([[0, 1, -100, -100], [2, 1, 0, 1]])
    found = weights.losses(logits, (y, torch.tensor([0, 1])))
    torch.testing.assert_close(found[0], F.cross_entropy(logits[:1], y[:1]))
    torch.testing.assert_close(found[1], F.cross_entropy(logits[1:], y[1:]))
    of_images = hyper.SourceWeights(2, nn.MSELoss())
    x, targets = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    torch.testing.assert_close(of_images.losses(x, (targets, None)), (x - targets).square().mean((1, 2)))


def test_mixup_mixes_examples_and_their_losses():
    torch.manual_seed(0)
    mixup, x, y = hyper.Mixup(1.0), torch.eye(4), torch.arange(4)
    share, others = (mixup(x), mixup._mixed.get())[1]
    logits = torch.randn(4, 4)
    expected = share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[others])
    torch.testing.assert_close(mixup.loss(logits, y), expected)
    assert torch.equal(mixup.eval()(x), x) and torch.equal(mixup.loss(logits, y), F.cross_entropy(logits, y))
    y[2:] = -100
    losses = [hyper.Mixup(1.0, nn.CrossEntropyLoss(reduction=each)) for each in ("mean", "none")]
    for one in losses:
        one._mixed.now = share, torch.tensor([2, 3, 1, 0])
    torch.testing.assert_close(*(mean(one.loss, logits, y) for one in losses))
    for other, message in ((copy.deepcopy(mixup), "nothing was"), (mixup, "4 was")):
        with pytest.raises(RuntimeError, match=f"there are 2 targets, and {message} mixed last"):
            other.train().loss(logits[:2], y[:2])


def test_optimizers_step_with_learned_rates_and_schedules_scale_them():
    model = with_two(hyper.LearningRate, 0.1, 0.2)
    partnets.partition(model, (1.0,))
    optimizer = optim.SGD(model, lr=7.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    before = [p.detach().clone() for p in model.network.parameters()]
    x, y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    for factor in (1.0, 0.5):
        optimizer.zero_grad()
        with partnets.subnetwork(model, 1, 1):
            F.cross_entropy(model(x), y).backward()
        optimizer.step(update=1)
        scheduler.step()
        for i, (was, now) in enumerate(zip(before, model.network.parameters(), strict=True)):
            torch.testing.assert_close(now.detach(), was - factor * (0.1, 0.1, 0.2, 0.2)[i] * now.grad)
            before[i] = now.detach().clone()
    assert copy.deepcopy((model, optimizer))[1]._rates.keys().isdisjoint(optimizer._rates)
    model.more = hyper.LearningRate(model.network[0], 0.3)
    with pytest.raises(ValueError, match=r"network\.0\.\w+ has two learning rates, and one of them is more;"):
        optim.SGD(model)


@pytest.mark.parametrize("scheme", ["weight", "nested"])
def test_vectors_are_not_decayed_in_a_partitioned_model_either(scheme):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.gamma, self.table = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(1, 16))

        def forward(self, x):
            return x * self.gamma + self.table

    network = nn.Sequential(nn.Linear(4, 16), Scaled(), nn.Linear(16, 2))
    decay = hyper.WeightDecay(network)
    assert len(decay.decayed()) == 3
    example = {"example": torch.randn(3, 4)} if scheme == "nested" else {}
    partnets.partition(nn.Sequential(network, decay), PROPORTIONS, scheme=scheme, **example)
    expected = [network[0].weight, network[1]._parameters["table"], network[2].weight]
    assert {*map(id, decay.decayed())} == {*map(id, expected)}


@pytest.mark.parametrize("defaults", ["stored", "zero"])
def test_only_learning_entries_of_an_attention_are_decayed(defaults):
    """Check the last layer of an attention, which reads that layer's weight."""
    attention = nn.MultiheadAttention(8, 2)
    linear = [module for module in attention.modules() if isinstance(module, nn.Linear)]
    decay = hyper.WeightDecay(linear)
    model = nn.ModuleDict({"attention": attention, "decay": decay})
    partnets.partition(model, PROPORTIONS, defaults=defaults)
    assert decay.decayed() == [model["attention"].out_proj.weight]
    with partnets.subnetwork(model, 1, 1), hyper.penalties() as found:
        decay(torch.ones(1))
        found[0].mean().backward()
    grad = model["attention"].out_proj.weight.grad
    mask = partnets.partitions(model)["attention.out_proj.weight"].mask(1)
    assert grad[mask].all() and not grad[~mask].any()


def test_rates_and_decays_of_layers_outside_of_the_model_raise():
    network = nn.Sequential(nn.Linear(4, 3))
    for module in (hyper.WeightDecay(network[0]), hyper.LearningRate(network[0])):
        model = partnets.partition(nn.Sequential(nn.Linear(4, 3), module), PROPORTIONS)
        with pytest.raises(ValueError, match=r"1 \(hyper\.\w+\) is of a Linear that is not in the model"):
            optim.SGD(model)


@pytest.mark.parametrize("ahead", [False, True])
def test_training_only_modules_are_off_when_held_out_data_judge(ahead):
    mixup, decay = hyper.Mixup(1.0), hyper.LabelSmoothing(0.1)
    model = partnets.partition(nn.Sequential(mixup, hyper.InputMask(4), nn.Linear(4, 2), decay), (0.5, 0.5))
    psi = [decay] if ahead else [model[1]]
    learning = torch.optim.SGD([p for one in psi for p in one.parameters()], lr=0.1)
    x, y, seen = torch.randn(6, 4), torch.arange(6) % 2, []

    def judge(batch):
        seen.append(mixup.training)
        return F.cross_entropy(model(batch[0]), batch[1])

    def learn(batch):
        assert mixup.training
        return decay(model(batch[0]), batch[1]).mean()

    optimizer = optim.SGD(model, lr=0.1)
    if ahead:
        partnets.step_lookahead(model, optimizer, learning, {2: ((x, y), [(x, y)])}, learn, judge)
    else:
        partnets.step_hyper(model, learning, {2: (x, y)}, judge)
    assert seen and not any(seen) and mixup.training


def test_mixup_works_in_a_compiled_model():
    mixup, x, y = hyper.Mixup(1.0), torch.randn(8, 5), torch.arange(8) % 3
    model = torch.compile(nn.Sequential(mixup, nn.Linear(5, 3)), backend="eager")
    for step in range(2):
        torch.manual_seed(step)
        output = model(x)
        loss = mixup.loss(output, y)
        torch.manual_seed(step)
        mixup(x)
        assert torch.equal(loss, mixup.loss(output, y))


@pytest.mark.parametrize("make", [hyper.LabelSmoothing, lambda: hyper.SourceWeights(3), hyper.Mixup])
def test_a_training_loss_that_is_not_the_trainers_loss_gets_a_warning(make):
    acts, x, y = make(), torch.randn(60, 5), torch.arange(60) % 3
    is_mixup = isinstance(acts, hyper.Mixup)
    network = nn.Sequential(*([acts, nn.Linear(5, 3)] if is_mixup else [nn.Linear(5, 3), acts]))
    network = partnets.finalize(partnets.partition(network, (0.8, 0.2)), "retrain")
    loss = network[0].loss if is_mixup else network[1]
    model, chunks = partnets.single_chunk(network, (x, y))
    with pytest.warns(UserWarning, match="acts only in the training loss, but the loss is another one; pass it as"):
        partnets.Trainer(model, chunks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partnets.Trainer(model, chunks, loss=loss)


@pytest.mark.parametrize(
    ("ignored", "own", "tokens"),
    # The class that a custom loss ignores cannot be detected.
    [
        (-100, False, False),
        (-100, True, True),
        (255, True, False),
        (255, False, True),
        (1, False, False),
        (1, False, True),
    ],
)
def test_ignored_examples_change_neither_losses_nor_weights_of_others(ignored, own, tokens):
    torch.manual_seed(0)
    inside = partial(F.cross_entropy, ignore_index=ignored, reduction="none")
    loss = (lambda *each: inside(*each)) if own else nn.CrossEntropyLoss(ignore_index=ignored)
    weights = hyper.SourceWeights(2, loss)
    weights.weights.assign([0.5, 2.0])
    logits, y, source = torch.randn(6, 3), torch.tensor([0, ignored, 2, 2, ignored, 0]), torch.arange(6) % 2
    counted = y != ignored
    if tokens:
        logits, y = logits[..., None].repeat(1, 1, 4), y[:, None].repeat(1, 4)
        y[counted, 2:] = ignored
    found = weights(logits, (y, source))
    torch.testing.assert_close(found, weights(logits[counted], (y[counted], source[counted])))
    torch.testing.assert_close(mean(weights, logits, (y, source)), found.mean())
    loss = mean(weights, logits.requires_grad_(), (torch.full_like(y, ignored), source))
    assert loss == 0
    loss.backward()
    assert not logits.grad.any() and not weights.weights.raw.grad.any()


def test_a_custom_training_loss_leaves_out_ignored_examples():
    class Halved(hyper.TrainingLoss):
        def trained(self, output, y):
            return self.losses(output, y) / 2

    logits, y = torch.randn(4, 3), torch.tensor([0, -100, 2, 1])
    halved, kept = Halved(), [0, 2, 3]
    expected = F.cross_entropy(logits[kept], y[kept], reduction="none")
    torch.testing.assert_close(halved(logits, y), expected / 2)
    torch.testing.assert_close(halved.plain(logits, y), expected)
    assert torch.equal(halved.eval()(logits, y), F.cross_entropy(logits, y)) and halved(logits) is logits


def test_labels_as_sources_are_torchs_class_weights():
    weights, logits, y = hyper.SourceWeights(3), torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 2, 1])
    weights.weights.assign([1.0, 2.0, 6.0])
    expected = F.cross_entropy(logits, y, weight=torch.tensor([1.0, 2.0, 6.0]))
    torch.testing.assert_close(weights(logits, (y, y)).mean(), expected)
