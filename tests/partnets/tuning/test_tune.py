"""tune: complete calls and their results, unchanged inputs, the data that each part learns from, and resumption."""

import copy
import functools
import math
import random
import sys
import types
import warnings

import numpy
import pytest
import torch
import torch.nn.functional as F
import tqdm.auto
from small_calls import COSINE, FAST, Rows, X, Y, classifier, labelled, pictures, seen, tuned, weights
from torch import nn
from torch.utils.data import TensorDataset

import partnets
from partnets import hyper
from partnets.tuning.hyperparameters import Setting
from partnets.tuning.notes import notes_of_choice
from partnets.tuning.result import Trial
from partnets.tuning.training import STARTS, Training
from partnets.utils.losses import token_cross_entropy


def test_the_result_is_a_network_of_torch_with_the_values():
    result = tuned(data=labelled())
    assert type(result.model) is nn.Sequential and not result.model.training
    assert result.model[2].p == result.values["dropout"]
    assert not torch.equal(weights(result.model), weights(classifier()))
    assert len(result.history) == 4 and math.isclose(sum(t.weight for t in result.history), 1.0)
    assert result.history[0].values == {"dropout": pytest.approx(0.1), "weight_decay": 0.0}
    assert len(repr(result)) < 200 and "dropout=" in repr(result)


def test_progress_ends_at_all_of_the_budget_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("partnets.tuning.run.tqdm", functools.partial(tqdm.auto.tqdm, mininterval=0))
    tuned(names=("dropout",))  # tqdm warns of a rounded sum beyond the end
    assert "100 % of the budget" in capsys.readouterr().err


def test_random_states_are_left_unchanged_by_noisy_images():
    network, (images, labels) = pictures()
    noisy, before = Rows(images, labels, lambda: torch.rand(())), torch.get_rng_state()
    tuned(network, noisy, [hyper.Affine()], steps=10)
    assert torch.equal(torch.get_rng_state(), before)


def test_networks_data_and_random_states_are_left_unchanged():
    network, x = classifier(), X.clone().requires_grad_()
    before = copy.deepcopy(network.state_dict())
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    noisy = Rows(X, Y, lambda: torch.rand(()) + numpy.random.rand() + random.random())
    for data in (noisy, (x, Y)):
        result = tuned(network, data)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (numpy.random.get_state()[1] == states[2]).all()
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert network.training and not set(network.parameters()) & set(result.model.parameters())
    assert x.grad is None and all(parameter.grad is None for parameter in result.model.parameters())
    frozen = X.numpy().copy()
    frozen.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned(data=(frozen, Y.numpy()))


def test_the_result_depends_on_the_seed_and_not_on_the_type_of_the_data():
    first, other = tuned(), tuned(seed=4)
    arrays, dataset, integers = (X.numpy().astype(numpy.float64), Y.numpy()), TensorDataset(X, Y), (X, Y.int())
    for again in (tuned(data=data) for data in ((X, Y), arrays, dataset, integers)):
        assert torch.equal(weights(first.model), weights(again.model)) and first.values == again.values
    assert first.values != other.values
    assert tuned(classifier().double(), (X.double(), Y)).model[0].weight.dtype == torch.float64


def test_the_cost_counts_the_passes_of_all_trainings(monkeypatch):
    assert 1.9 < tuned(steps=40).cost < 2.4  # evaluations of 12 examples at each tenth; 640 trained ones
    assert 2.7 < tuned(*pictures(), [hyper.Affine()], steps=60).cost < 3.2  # random labels, so that they begin twice
    monkeypatch.setattr("partnets.tuning.run.STARTS", STARTS[:1])
    for names in ([hyper.Affine()], [hyper.Affine(), "dropout"]):
        assert 1.7 < tuned(*pictures(), names, steps=60).cost < 2.2


class Annealed(nn.Module):
    """A network that counts its steps in an attribute."""

    def __init__(self):
        super().__init__()
        self.inner, self.count = classifier(), 0

    def forward(self, x):
        self.count += self.training
        return self.inner(x) * (1 + self.count / 20)


class Killed(Exception):
    pass


def kill_after(tenths):
    calls = []

    def kill(training):
        calls.append(training.done)
        if len(calls) == tenths:
            raise Killed

    return kill


PICTURES = dict(zip(("network", "data"), pictures(), strict=True)) | {"names": [hyper.Affine(), "dropout"]}
THREE = {"proportions": (0.8, 0.1, 0.1)}


@pytest.mark.cases(usual=4)
@pytest.mark.parametrize(
    ("options", "tenths"),
    [
        *(({"names": ["dropout", "label_smoothing", "learning_rate"]}, tenths) for tenths in (3, 17, 62, 74)),
        *((PICTURES, tenths) for tenths in (34, 42)),
        (THREE, 25),
        ({"network": Annealed()}, 25),
        ({"names": ["learning_rate"], "scheduler": COSINE}, 25),
    ],
)
def test_an_interrupted_search_resumes_to_the_same_bits_and_a_finished_one_is_not_run_again(tmp_path, options, tenths):
    path, options = tmp_path / "search.pt", {"steps": 20} | options
    whole = tuned(**options)
    with pytest.raises(Killed):
        tuned(**options, resume_from=path, callbacks=[kill_after(tenths)])
    for result in (tuned(**options, resume_from=path), tuned(**options, resume_from=path, callbacks=[kill_after(1)])):
        assert torch.equal(weights(result.model), weights(whole.model)) and result.history == whole.history
        for name in ("values", "lml", "steps", "cost", "counted", "schedule", "notes"):
            assert getattr(result, name) == getattr(whole, name)


def test_a_search_that_is_killed_after_its_last_judgement_resumes(tmp_path, monkeypatch):
    def kill(training):
        raise Killed

    whole = tuned(steps=20)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Training, "guessed_nats", kill)
        tuned(steps=20, resume_from=tmp_path / "search.pt")
    result = tuned(steps=20, resume_from=tmp_path / "search.pt")
    assert result.counted == whole.counted > 0 and result.values == whole.values


def scaled(factor):
    return lambda output, y: factor * F.cross_entropy(output, y)


def nested(factor):
    inner = scaled(factor)
    return lambda output, y: inner(output, y)


class Times(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = classifier()

    def forward(self, x):
        return self.inner(x)


class Tripled(Times):
    def forward(self, x):
        return self.inner(x) * 3


Tripled.__name__ = "Times"  # as if its code had been changed


def without(layer):
    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4, 4), nn.Linear(4, 3))
    torch.manual_seed(0)
    for parameter in network.parameters():
        nn.init.normal_(parameter)
    network[layer].requires_grad_(False)
    return network


def changed(values, by):
    """Return a copy in which one of many values differs."""
    values = values.clone()
    values[150] = (values[150] + by) % 3
    return values


MANY, MASK, TEMPERATURE = labelled(300), hyper.InputMask(4), hyper.Temperature()
LEARNING = {"network": nn.Sequential(MASK, classifier(), TEMPERATURE)}
OWN_NOISE = Rows(X, Y, functools.partial(numpy.random.default_rng().normal, scale=1e-4))


@pytest.mark.cases(usual=8)
@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({}, {"seed": 5}),
        ({}, {"optimizer": functools.partial(torch.optim.SGD, lr=0.5)}),
        ({}, {"optimizer": functools.partial(torch.optim.Adam, lr=0.5)}),
        ({}, {"scheduler": COSINE}),
        ({}, {"network": nn.Sequential(*classifier()[:1], nn.Tanh(), *classifier()[2:])}),
        ({}, {"forward": lambda network, batch: (2 * network(batch[0]), batch[1])}),
        ({}, {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0, 1.0]))}),
        ({"loss": scaled(1.0)}, {"loss": scaled(2.0)}),
        ({"loss": nested(1.0)}, {"loss": nested(2.0)}),
        ({"loss": functools.partial(nested(1.0))}, {"loss": functools.partial(nested(2.0))}),
        ({"loss": lambda o, y: F.cross_entropy(o, y)}, {"loss": lambda o, y: F.multi_margin_loss(o, y)}),
        ({"loss": nn.CrossEntropyLoss()}, {"loss": nn.CrossEntropyLoss(label_smoothing=0.3)}),
        ({"network": Times()}, {"network": Tripled()}),
        ({"network": without(0)}, {"network": without(3)}),
        ({"data": Rows(X, Y)}, {"data": Rows(2 * X, Y)}),
        ({"data": Rows(X, Y)}, {"data": Rows(X, 2 - Y)}),
        ({"data": MANY}, {"data": (MANY[0], changed(MANY[1], 1))}),
        ({"data": MANY}, {"data": (changed(MANY[0], 0.5), MANY[1])}),
        (LEARNING | {"names": [MASK]}, LEARNING | {"names": [TEMPERATURE]}),
        ({"data": OWN_NOISE}, {"data": OWN_NOISE, "seed": 5}),
    ],
)
def test_a_file_of_another_search_is_refused(tmp_path, first, other):
    options = {"resume_from": tmp_path / "search.pt", "names": ["dropout"], "steps": 2}
    values = tuned(**options | first).values
    assert tuned(**options | first).values == values
    with pytest.raises(ValueError, match="is of another search: the network, the data or an argument differs"):
        tuned(**options | other)


def test_a_file_that_holds_no_search_is_refused(tmp_path):
    path = tmp_path / "search.pt"
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"is not a file of partnets\.tune"):
        tuned(resume_from=path)


@pytest.mark.parametrize("proportions", [(0.8, 0.2), (0.8, 0.1, 0.1)])
def test_examples_of_the_last_chunk_do_not_reach_the_weights_of_the_search(proportions):
    """Poison the examples of chunk C, which may change judgements but no trained weights."""
    found = []
    for poison in (0.0, 100.0):
        poisoned = X.clone()
        poisoned[partnets.chunk((X, Y), proportions, seed=3).indices(len(proportions))] += poison
        options = {"data": (poisoned, Y), "proportions": proportions}
        found.append(torch.stack(seen(lambda training: weights(training.network), **options)[:24]))
    assert torch.equal(*found)


@pytest.mark.parametrize("proportions", [(0.8, 0.1, 0.1), (0.6, 0.1, 0.1, 0.1, 0.1)])
def test_more_chunks_partition_the_network(proportions):
    partitioned = []
    result = tuned(proportions=proportions, callbacks=lambda training: partitioned.append(training.partitioned))
    assert any(partitioned) and type(result.model[0]) is nn.Linear


def test_a_squared_error_counts_by_its_logarithm_whatever_the_chunks():
    for proportions in ((0.8, 0.2), (0.8, 0.1, 0.1)):
        large = tuned(classifier(1), (X, 100 * X[:, :1]), ["weight_decay"], proportions=proportions)
        assert -12 / 2 * math.log(2e4) < large.lml < -12 / 2 * math.log(1e3)
    twice = tuned(classifier(2), (X, 100 * X[:, :1].expand(60, 2)), ["weight_decay"])
    assert twice.lml == pytest.approx(2 * large.lml, rel=0.1)  # two numbers per example
    options = {"names": ["weight_decay"], "loss": nn.MSELoss(reduction="none")}
    assert tuned(classifier(2), (X, 100 * X[:, :1].expand(60, 2)), **options).lml == pytest.approx(twice.lml, rel=1e-4)


def test_a_decoupled_weight_decay_stays_decoupled_in_partitioned_networks():
    adam = functools.partial(torch.optim.Adam, lr=0.03, decoupled_weight_decay=True)
    adamw = functools.partial(torch.optim.AdamW, lr=0.03, weight_decay=0.0)
    options = {"names": ["weight_decay"], "proportions": (0.6, 0.2, 0.2)}
    results = [tuned(optimizer=optimizer, **options) for optimizer in (adam, adamw)]
    assert results[0].lml == pytest.approx(results[1].lml, rel=1e-3)


def sparse(n, every):
    """Return counts with only zeros in a batch."""
    y = torch.zeros(n, 1)
    y[::every] = 7.0
    return y


class InDict(nn.Module):
    """A layer that puts its input in a dict, as logits."""

    def forward(self, x):
        return {"logits": x}


def test_kinds_of_targets_choose_the_loss():
    binary, tokens = F.binary_cross_entropy_with_logits, torch.randint(5, (40, 7))
    language = nn.Sequential(nn.Embedding(5, 8), nn.Dropout(0.0), nn.Linear(8, 5))
    named = nn.Sequential(language, InDict())
    cases = [
        (classifier(), (X, Y), F.cross_entropy),
        (classifier(), (X, torch.randn(60, 3).softmax(1)), F.cross_entropy),
        (classifier(), (X, (X[:, :3] > 0).float()), binary),
        (classifier(1), (X, X[:, :1]), F.mse_loss),
        (classifier(1), (X, sparse(60, 20)), F.mse_loss),
        (classifier(1), Rows(torch.randn(600, 4), sparse(600, 50)), F.mse_loss),
        (language, (tokens, tokens), token_cross_entropy),
        (named, (tokens, tokens), token_cross_entropy),
    ]
    for network, data, loss in cases:
        assert set(seen(lambda training: training.loss, network, data, ["weight_decay"])) == {loss}
    assert 0 <= tuned(language, (tokens, tokens), ["label_smoothing"]).values["label_smoothing"] < 0.9


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss, nn.CrossEntropyLoss])
def test_weights_of_classes_count_for_unseen_data_too(loss):
    x, _ = labelled(300)
    binary, weight = loss is nn.BCEWithLogitsLoss, torch.tensor([1.0, 20.0])
    y = (x[:, 0] > 1.2).float()[:, None] if binary else (x[:, 0] > 1.2).long()
    loss = loss(pos_weight=weight[1:]) if binary else loss(weight)
    judges = set()
    options = {"loss": loss, "stratify": y.flatten(), "steps": 60, "callbacks": [lambda one: judges.add(one.judge)]}
    result = tuned(classifier(1 if binary else 2), (x, y), ["dropout"], **options)
    assert judges == {loss}
    assert not any(note.startswith("No training of the search") for note in result.notes)


def test_batches_with_only_ignored_labels_train_nothing():
    x, y = labelled(300)
    y[60:] = -100
    losses = []
    result = tuned(data=(x, y), steps=40, seed=0, callbacks=[lambda training: losses.extend(training.judged)])
    assert all(map(math.isfinite, losses)) and result.counted < 60
    assert (result.model(x[:60]).argmax(1) == y[:60]).float().mean() > 0.8


class Filled(nn.Module):
    def forward(self, x):
        return x.nan_to_num()


def test_missing_numbers_that_the_network_or_the_loss_leaves_out_are_data():
    def loss(output, y):
        return F.mse_loss(output[y.isfinite()], y[y.isfinite()])

    missing = torch.cat([X[:-1], torch.full_like(X[:1], math.nan)])
    assert tuned(nn.Sequential(Filled(), classifier()), (missing, Y), steps=1).history
    assert tuned(classifier(1), (X, missing[:, :1]), steps=1, loss=loss).history


def test_a_training_that_diverges_is_left_out_of_the_choice():
    begun = []

    def explode(training):
        if training not in begun:
            begun.append(training)
        if len(begun) == 2:
            nn.init.constant_(training.network[0].weight, math.nan)

    result = tuned(steps=10, callbacks=[explode])
    assert [trial.nats[-1] == math.inf for trial in result.history] == [False, True, False, False]
    assert result.history[1].weight == 0 and math.isfinite(result.lml) and len(result.history[1].nats) == 10


def test_a_final_training_that_diverges_raises():
    def explode(training):
        if not training.is_judged:
            nn.init.constant_(training.network[0].weight, math.nan)

    with pytest.raises(FloatingPointError, match="in step 2 of the final training; pass an optimizer with a lower"):
        tuned(steps=10, callbacks=[explode])


def test_batch_normalisation_gets_batches_of_four_or_more():
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 3))
    assert min(seen(lambda training: training.batch_size, network, batch_size=32)) >= 4


def test_a_frozen_backbone_in_evaluation_mode_stays_as_it_is():
    backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).requires_grad_(False).eval()
    network = nn.Sequential(backbone, nn.Dropout(0.1), nn.Linear(8, 3))
    found = tuned(network, (3 * X + 5, Y), ["dropout"], batch_size=32).model[0].state_dict()
    assert all(torch.equal(found[name], value) for name, value in backbone.state_dict().items())
    sizes = seen(lambda training: training.batch_size, network, batch_size=32)
    assert min(sizes) == min(seen(lambda training: training.batch_size, batch_size=32)) < 4
    assert all(seen(lambda training: training.network[0][1].training, network.eval(), batch_size=32))


class Unused(nn.Module):
    """A network with dropout in a frozen backbone, and dropout that is not called."""

    def __init__(self, network):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)).requires_grad_(False).eval()
        self.network, self.unused = network, nn.Dropout(0.2)

    def forward(self, x):
        return self.network(self.backbone(x))


def test_dropout_that_is_not_used_or_frozen_is_left_out():
    result = tuned(Unused(classifier()))
    assert sorted(result.values) == ["dropout.network.2", "weight_decay"]
    assert result.model.backbone[1].p == 0.3 and result.model.unused.p == 0.2
    with pytest.raises(ValueError, match=r"dropout changes nothing"):
        tuned(Unused(nn.Linear(4, 3)), names=["dropout"])


@pytest.mark.parametrize("kind", ["weight_decay", "penalty"])
def test_settings_with_an_effect_that_rounds_to_zero_at_first_are_tuned(kind):
    """Start with a tiny learning rate that a schedule raises later."""
    network, names = classifier(), ["weight_decay"]
    if kind == "penalty":
        names = [hyper.WeightDecay(network)]
        network = nn.Sequential(network, names[0])
    warm = functools.partial(torch.optim.lr_scheduler.LinearLR, start_factor=1e-6, total_iters=10**6)
    result = tuned(network, names=names, scheduler=warm, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    assert len(result.values) == 1


def test_a_schedule_scales_the_learning_rate_in_every_training():
    rate = torch.tensor(0.03)  # stays the user's
    options = {"names": ["learning_rate"], "scheduler": COSINE, "steps": 20}
    optimizer = functools.partial(torch.optim.Adam, lr=rate)
    rates = seen(lambda one: float(one.optimizer.param_groups[0]["lr"]), optimizer=optimizer, **options)
    assert rates[9::10] == pytest.approx([0.0] * len(rates[9::10]))
    assert rates[4] == pytest.approx(0.015) and rates[14] != rates[4] and rate == torch.tensor(0.03)
    later = torch.optim.lr_scheduler.LambdaLR  # for example a warm-up stepped by epochs
    assert "learning_rate" in tuned(**options | {"scheduler": lambda one: later(one, lambda step: step // 5)}).values


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize(
    ("names", "proportions"),
    [
        (["dropout", "learning_rate"], (0.8, 0.2)),
        ([hyper.Affine()], (0.8, 0.1, 0.1)),
        ([hyper.InputMask(6)], (0.8, 0.2)),
    ],
)
def test_the_default_device_may_be_another(names, proportions):
    network = nn.Sequential(nn.Flatten(), nn.Linear(36, 3), nn.Dropout(0.1))
    data, slow = (torch.rand(60, 1, 6, 6), Y), functools.partial(torch.optim.SGD, lr=0.1)
    with torch.device("meta"):
        assert tuned(network, data, names, proportions=proportions, optimizer=slow).model(data[0]).shape == (60, 3)


def test_chunks_keep_the_share_of_a_rare_class():
    y = torch.zeros(60, dtype=torch.long)
    y[:5] = 1
    shares = seen(lambda one: y[one.problem.chunks.indices(2)].sum().item(), classifier(2), (X, y), stratify=y)
    assert set(shares) == {1}


def test_callbacks_may_leave_the_network_in_evaluation_mode():
    watched = tuned(steps=20, callbacks=[lambda training: training.network.eval()])
    assert watched.values == tuned(steps=20).values


def test_a_network_that_memorises_its_examples_keeps_the_chosen_values():
    torch.manual_seed(0)
    x, y = torch.randn(60, 8), torch.randn(60, 1)  # nothing to learn, and few examples
    network = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.0), nn.Linear(64, 1))
    result = tuned(network, (x, y), steps=80, seed=0)
    assert result.values == result.confirmed.values != result.history[0].values
    assert "guess that is the same for all, and an untuned one learns its own examples by heart" in result.notes[0]


def test_a_search_that_learns_nothing_leaves_the_values_as_they_are():
    torch.manual_seed(0)
    data = torch.randn(400, 4), torch.randint(2, (400,))  # unpredictable labels
    options = {"names": ["dropout", "label_smoothing"], "steps": 20, "optimizer": torch.optim.Adam}
    result = tuned(classifier(2), data, loss=nn.CrossEntropyLoss(label_smoothing=0.3), seed=0, **options)
    assert result.values == {"dropout": pytest.approx(0.1), "label_smoothing": pytest.approx(0.3)}
    assert result.notes[0].startswith("No training of the search predicted unseen data better than a guess")
    assert result.confirmed.values != result.values and result.lml == -result.history[0].nats[-1]
    assert result.steps == 20 and not any("of the search apart" in note for note in result.notes)


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (lambda output, y: F.cross_entropy(output, y), ["dropout"]),
        (lambda output, y: F.l1_loss(output[:, 0], y.float()), ["dropout"]),
        (None, [hyper.Affine()]),
    ],
)
def test_predictions_no_better_than_a_constant_guess_are_noted(loss, names):
    torch.manual_seed(0)
    x, y = torch.rand(300, 1, 2, 2), torch.randint(2, (300,))  # unpredictable labels
    network = nn.Sequential(nn.Flatten(), classifier(2))
    options = {"names": names, "loss": loss, "seed": 0}
    result = tuned(network, (x, y), steps=20, optimizer=torch.optim.Adam, **options)
    assert result.notes[0].startswith("No training of the search predicted unseen data better than a guess")
    learnt = (x, (x[:, 0, 0, 0] > 0.5).long())
    result = tuned(network, learnt, steps=60, **options)
    assert not any(note.startswith("No training of the search") for note in result.notes)


REGRESSION = {"network": classifier(1), "data": (X, X[:, :1]), "names": ["weight_decay"], "steps": 30}
SLOW, NEARLY_STILL = functools.partial(FAST, lr=2e-3), functools.partial(FAST, lr=2e-4)
FEW = {"stratify": torch.arange(30) % 3, "optimizer": functools.partial(torch.optim.SGD, lr=1e-6)}
FEW |= {"data": (torch.randn(30, 4) / 10, FEW["stratify"])}
LOG_PROBABILITIES = {"network": nn.Sequential(*classifier(), nn.LogSoftmax(1)), "data": labelled(150), "steps": 30}
MOSTLY_UNLABELLED = X, torch.where(torch.arange(len(Y)) % 6 > 0, -100, Y)
APART = "Unseen data do not tell the trainings of the search apart"
GUESS, NATS = "No training of the search", "no negative log-likelihood"


@pytest.mark.parametrize(
    ("options", "note", "is_noted"),
    [
        (REGRESSION | {"loss": nn.HuberLoss()}, NATS, True),
        (REGRESSION | {"loss": F.l1_loss}, NATS, True),
        (REGRESSION | {"loss": nn.MSELoss()}, NATS, False),
        (REGRESSION | {"loss": lambda a, b: (a - b).abs().mean()}, NATS, False),
        (LOG_PROBABILITIES | {"loss": lambda output, y: F.nll_loss(output, y)}, GUESS, False),
        ({"names": ["weight_decay"], "steps": 40, "optimizer": functools.partial(torch.optim.SGD, lr=0.1)},
         APART, True),
        ({"data": labelled(120), "names": ["dropout"], "steps": 20, "optimizer": NEARLY_STILL, "seed": 0},
         "untuned training. Pass more steps or a larger budget.", True),
        (FEW, "untuned training", True),
        (FEW, "6 unseen examples judged the trainings", True),
        ({"data": MOSTLY_UNLABELLED, "steps": 20}, "unseen targets judged the trainings; with so few", True),
        ({"data": labelled(400), "names": ["learning_rate"], "steps": 40, "optimizer": SLOW, "seed": 0},
         "learning_rate was best at the end of what was tried; pass 0.0", True),
        ({"steps": 4, "batch_size": 4, "budget": 6}, "The cost of", True),
    ],
)  # fmt: skip
def test_notes_name_the_limits_of_a_result(options, note, is_noted):
    result = tuned(**options)
    assert any(note in each for each in result.notes) == (note in result.report()) == is_noted


@pytest.mark.parametrize(("shares", "is_noted"), [((0.0, 0.05, 0.95), True), ((0.0, 0.95, 0.05), False)])
def test_a_note_tells_if_the_strongest_regularisation_was_the_best(shares, is_noted):
    settings = [Setting(name, 0.0, 1.0, put=lambda training, value: None) for name in ("dropout", "weight_decay")]
    values = [{"dropout": 0.0, "weight_decay": 0.0}, {"dropout": 0.2, "weight_decay": 0.5}]
    values.append({"dropout": 0.9, "weight_decay": 0.4})
    pairs = zip(values, shares, strict=True)
    history = [Trial(one, [9.0, 8.0 - w], 8, 0.1, 10, weight=w) for one, w in pairs]
    problem = types.SimpleNamespace(settings=settings, loss=F.cross_entropy)
    notes = [*notes_of_choice(problem, history, torch.tensor([0.9, 0.4]))]
    assert any(note.startswith("The strongest regularisation that was tried") for note in notes) == is_noted


def test_the_report_has_the_unseen_targets_and_the_means_that_decide():
    result = tuned(steps=20)
    assert f"nats of {result.counted} unseen targets" in result.report() and result.counted == 12
    late = result.history[0].nats[5:]
    assert f"{-sum(late) / 5:.1f}" in result.report().splitlines()[4] and "tried" in result.report()
