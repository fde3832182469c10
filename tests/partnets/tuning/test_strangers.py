"""tune with users' networks and data: it leaves them unchanged, rejects invalid ones, and adds notes to its result."""

import copy
import functools
import math
import random
import warnings

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import partnets
from partnets import hyper
from partnets.tuning.problem import make_problem
from partnets.tuning.result import Trial
from partnets.tuning.run import notes_of_choice

FAST = functools.partial(torch.optim.Adam, lr=0.03)


def classifier(classes=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, classes))


def labelled(n=60):
    torch.manual_seed(1)
    x = torch.randn(n, 4)
    return x, x[:, :3].argmax(1)


X, Y = labelled()


def tuned(network=None, data=None, names=("dropout", "weight_decay"), **options):
    options = {"steps": 6, "batch_size": 16, "optimizer": FAST} | options
    return partnets.tune(network or classifier(), (X, Y) if data is None else data, list(names), **options)


class Rows(Dataset):
    """A data set of pairs; with `noise`, it adds draws of torch, NumPy and Python to x."""

    def __init__(self, x, y, noise=False):
        self.x, self.y, self.noise = x, y, noise

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        drawn = (torch.rand(()) + numpy.random.rand() + random.random()) if self.noise else 0.0
        return self.x[i] + drawn, self.y[i]


def test_what_changes_predictions_stays_before_the_network():
    result = tuned(names=[hyper.InputMask(4), hyper.Submodule(nn.Linear(4, 4))], steps=20)
    assert len(result.model) == 3 and isinstance(result.model[1], nn.Linear)
    assert not torch.equal(result.model(X), result.model[2](X))
    mask = torch.tensor([result.values[name] for name in sorted(result.values)[:4]])
    assert mask.shape == (4,)


def test_images_of_bytes_are_augmented_before_a_network_that_takes_them():
    images, labels = torch.randint(256, (40, 1, 6, 6), dtype=torch.uint8), torch.randint(2, (40,))
    network = nn.Sequential(partnets.data.ToFloat(), nn.Flatten(), nn.Linear(36, 2))
    result = tuned(network, (images, labels), [hyper.Affine()])
    assert len(result.model) == 3 and torch.equal(result.model(images), result.model(images / 255))
    assert result.averaged(2)(images).shape == (40, 2)
    masked = tuned(network, (images, labels), [hyper.Affine(), hyper.InputMask(6)])
    assert torch.allclose(masked.model(images), masked.model(images / 255))


def test_what_changes_the_shape_of_inputs_may_come_first():
    network = nn.Linear(6, 3)
    result = tuned(network, names=["weight_decay", hyper.Submodule(nn.Linear(4, 6))], steps=8)
    assert result.model(X).shape == (60, 3)


def test_averages_are_over_augmentations_that_come_first():
    images, labels = torch.rand(40, 1, 6, 6), torch.randint(2, (40,))
    network, filtered = nn.Sequential(nn.Flatten(), nn.Linear(36, 2)), hyper.Submodule(nn.Conv2d(1, 1, 3, padding=1))
    assert tuned(network, (images, labels), [hyper.Affine(), filtered]).averaged(2)(images).shape == (40, 2)
    with pytest.raises(ValueError, match="no augmentation before the network was tuned"):
        tuned(network, (images, labels), [filtered, hyper.Affine()]).averaged(2)


@pytest.mark.parametrize("kind", [hyper.Temperature, hyper.ObservationNoise])
def test_what_acts_on_predictions_is_not_put_before_the_network(kind):
    with pytest.raises(ValueError, match=f"{kind.__name__} acts on predictions; put it behind the network"):
        tuned(names=[kind()])


def test_targets_of_a_dataset_that_are_mostly_zero_are_a_regression():
    y = torch.zeros(600, 1)
    y[::50] = 5.0
    losses = []
    data = Rows(torch.randn(600, 4), y)
    tuned(classifier(1), data, ["weight_decay"], callbacks=[lambda training: losses.append(training.loss)])
    assert set(losses) == {F.mse_loss}


def test_a_search_that_learns_nothing_leaves_the_values_as_they_are():
    torch.manual_seed(0)
    x, y = torch.randn(400, 4), torch.randint(2, (400,))  # unpredictable labels
    result = tuned(classifier(2), (x, y), ["dropout", "label_smoothing"], steps=20, optimizer=torch.optim.Adam)
    assert result.values == {"dropout": pytest.approx(0.1), "label_smoothing": 0.0}
    assert result.notes[0].startswith("No training of the search predicted unseen data better than a guess")
    assert result.confirmed.values != result.values
    assert result.lml == -result.history[0].nats[-1]
    assert result.steps == 20 and not any("of the search apart" in note for note in result.notes)


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (lambda output, y: F.cross_entropy(output, y), ["dropout"]),
        pytest.param(lambda output, y: F.l1_loss(output[:, 0], y.float()), ["dropout"], marks=pytest.mark.full),
        pytest.param(None, [hyper.Affine()], marks=pytest.mark.full),
    ],
)
def test_a_guess_is_known_of_every_loss_of_rows(loss, names):
    torch.manual_seed(0)
    x, y = torch.rand(300, 1, 2, 2), torch.randint(2, (300,))  # unpredictable labels
    network = nn.Sequential(nn.Flatten(), classifier(2))
    result = tuned(network, (x, y), names, steps=20, loss=loss, optimizer=torch.optim.Adam)
    assert result.notes[0].startswith("No training of the search predicted unseen data better than a guess")
    learnt = (x, (x[:, 0, 0, 0] > 0.5).long())
    result = tuned(network, learnt, names, steps=60, loss=loss, optimizer=FAST)
    assert not any(note.startswith("No training of the search") for note in result.notes)


def test_log_probabilities_of_a_loss_of_the_users_are_not_outdone_by_what_is_none():
    network = nn.Sequential(*classifier(), nn.LogSoftmax(1))
    result = tuned(network, labelled(150), ["dropout"], steps=30, loss=lambda output, y: F.nll_loss(output, y))
    assert not any(note.startswith("No training of the search") for note in result.notes)


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss, nn.CrossEntropyLoss])
def test_weights_of_classes_count_for_unseen_data_too(loss):
    x, y = labelled(300)
    binary, weight = loss is nn.BCEWithLogitsLoss, torch.tensor([1.0, 20.0])
    y = (x[:, 0] > 1.2).float()[:, None] if binary else (x[:, 0] > 1.2).long()
    loss = loss(pos_weight=weight[1:]) if binary else loss(weight)
    judges = set()
    options = {"loss": loss, "stratify": y.flatten(), "steps": 60, "callbacks": [lambda one: judges.add(one.judge)]}
    result = tuned(classifier(1 if binary else 2), (x, y), ["dropout"], **options)
    assert judges == {loss}
    assert not any(note.startswith("No training of the search") for note in result.notes)


def test_a_training_that_has_not_learned_yet_is_not_taken_for_one_that_memorises():
    result = tuned(data=labelled(120), names=["dropout"], steps=20, optimizer=functools.partial(FAST, lr=2e-4))
    assert result.values == {"dropout": pytest.approx(0.1)} and result.notes[0].endswith("a larger budget.")


def test_few_unseen_examples_have_a_note_if_the_values_stay_untuned_too():
    torch.manual_seed(0)
    x, y = torch.randn(30, 4) / 10, torch.arange(30) % 3
    notes = tuned(data=(x, y), stratify=y, optimizer=functools.partial(torch.optim.SGD, lr=1e-6)).notes
    assert "untuned training. Pass" in notes[0] and notes[1].startswith("6 unseen examples judged the trainings")


def test_many_numbers_that_unseen_examples_train_have_a_note_and_weights_the_rate_of_weights():
    torch.manual_seed(0)
    x = torch.randn(520, 5)
    y = (x[:, 0] + torch.randn(520) > 0).long()
    extractor = hyper.Submodule(nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 8)))
    network, data = nn.Sequential(extractor, nn.ReLU(), nn.Linear(8, 2)), (x[:120], y[:120])
    result = tuned(network, data, [extractor], steps=300, batch_size=32, optimizer=torch.optim.Adam)
    assert any(note.startswith("456 numbers learned by gradient descent from 24 unseen") for note in result.notes)
    assert F.cross_entropy(result.model(x[120:]), y[120:]) < 0.69


def test_callbacks_may_leave_the_network_in_evaluation_mode():
    watched = tuned(steps=20, callbacks=[lambda training: training.network.eval()])
    assert watched.values == tuned(steps=20).values


class Annealed(nn.Module):
    """A network that counts its steps in an attribute."""

    def __init__(self):
        super().__init__()
        self.inner, self.count = classifier(), 0

    def forward(self, x):
        self.count += self.training
        return self.inner(x) * (1 + self.count / 20)


def test_numbers_of_python_in_a_network_are_kept_with_a_search(tmp_path):
    options, calls = {"network": Annealed(), "steps": 10, "resume_from": tmp_path / "search.pt"}, []

    def interrupt(_):
        calls.append(0)
        if len(calls) == 25:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned(callbacks=[interrupt], **options)
    resumed, whole = tuned(**options), tuned(**options | {"resume_from": None})
    assert resumed.values == whole.values and resumed.lml == whole.lml


def test_batches_of_ignored_labels_alone_train_nothing():
    x, y = labelled(300)
    y[60:] = -100
    losses = []
    result = tuned(data=(x, y), steps=40, callbacks=[lambda training: losses.extend(training.judged)])
    assert all(map(math.isfinite, losses)) and result.counted < 60
    assert (result.model(x[:60]).argmax(1) == y[:60]).float().mean() > 0.8


def test_a_network_that_learns_its_examples_by_heart_keeps_the_chosen_values():
    torch.manual_seed(0)
    x, y = torch.randn(60, 8), torch.randn(60, 1)  # nothing to learn, and few examples
    network = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.0), nn.Linear(64, 1))
    result = tuned(network, (x, y), steps=80)
    assert result.values == result.confirmed.values != result.history[0].values
    assert (
        "better than a guess that is the same for all, and an untuned one learns its own examples by heart"
        in result.notes[0]
    )


def test_settings_that_change_nothing_are_refused():
    other = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"changes nothing in 3 training steps; leave it out of hyper"):
        tuned(names=["dropout", hyper.WeightDecay(other)])
    unused = pytest.raises(ValueError, match=r"changes nothing in 3 training steps; leave it out of hyper")
    with pytest.warns(UserWarning, match=r"SourceWeights \(0\) acts only in the training loss"), unused:
        tuned(names=[hyper.SourceWeights(3)])


@pytest.mark.parametrize("names", [["weight_decay"], ["penalty"]])
def test_settings_whose_effect_is_rounded_away_at_first_are_taken(names):
    """Start with a tiny learning rate that a schedule raises later."""
    network = classifier()
    if names == ["penalty"]:
        names = [hyper.WeightDecay(network)]
        network = nn.Sequential(network, names[0])
    warm = functools.partial(torch.optim.lr_scheduler.LinearLR, start_factor=1e-6, total_iters=10**6)
    result = tuned(network, names=names, scheduler=warm, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    assert len(result.values) == 1


def test_dropout_that_is_not_used_or_frozen_is_left_out():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)).requires_grad_(False).eval()
            self.network, self.unused = classifier(), nn.Dropout(0.2)

        def forward(self, x):
            return self.network(self.backbone(x))

    result = tuned(Model())
    assert sorted(result.values) == ["dropout.network.2", "weight_decay"]
    assert result.model.backbone[1].p == 0.3 and result.model.unused.p == 0.2
    model = Model()
    model.network = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=r"dropout changes nothing|no nn\.Dropout in training mode"):
        tuned(model, names=["dropout"])


def test_the_learning_rate_follows_a_schedule_in_every_training(tmp_path):
    cosine = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=10)
    rates, path = [], tmp_path / "search.pt"

    def watch(training):
        rates.append((training.done, training.optimizer.param_groups[0]["lr"]))
        if len(rates) == 25:
            raise KeyboardInterrupt

    options = {"names": ["learning_rate"], "scheduler": cosine, "steps": 10}
    whole = tuned(**options)
    with pytest.raises(KeyboardInterrupt):
        tuned(callbacks=[watch], resume_from=path, **options)
    assert [rate for done, rate in rates if done == 10] == pytest.approx([0.0, 0.0])
    assert rates[4][1] == pytest.approx(0.015) and rates[14][1] != rates[4][1]
    assert tuned(resume_from=path, **options).values == whole.values
    later = torch.optim.lr_scheduler.LambdaLR  # for example a warm-up stepped by epochs
    assert "learning_rate" in tuned(**options | {"scheduler": lambda one: later(one, lambda step: step // 5)}).values


def test_a_learning_rate_that_is_a_tensor_stays_the_users():
    rate = torch.tensor(0.03)
    options = {"names": ["dropout", "learning_rate"], "steps": 10}
    cosine = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=10)
    found = [
        tuned(optimizer=functools.partial(torch.optim.Adam, lr=one), scheduler=cosine, **options)
        for one in (rate, 0.03)
    ]
    assert rate == torch.tensor(0.03) and found[0].values == pytest.approx(found[1].values)
    assert torch.allclose(found[0].model[0].weight, found[1].model[0].weight, atol=1e-3)


def cycle(optimizer, steps=11):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)


@pytest.mark.parametrize(
    ("scheduler", "error", "message"),
    [
        (cycle, ValueError, "learning_rate changes nothing, as the scheduler sets it"),
        (functools.partial(cycle, steps=4), ValueError, r"the scheduler fails after 4 of 10 steps: Tried to step 5"),
        (lambda _: torch.optim.lr_scheduler.StepLR(FAST([nn.Parameter(X)]), 3), ValueError, "of another optimizer"),
        (torch.optim.lr_scheduler.StepLR, TypeError, "scheduler cannot be called with only an optimizer"),
        (lambda one: torch.optim.lr_scheduler.LambdaLR(one, lambda _: 0.0), ValueError, "rate of 0 in all 10 steps"),
        (torch.optim.lr_scheduler.ReduceLROnPlateau, TypeError, "a ReduceLROnPlateau; return one that steps without"),
    ],
)
def test_schedulers_that_schedule_nothing_are_refused(scheduler, error, message):
    with pytest.raises(error, match=message):
        tuned(names=["learning_rate"], scheduler=scheduler, steps=10)


def test_a_scheduler_within_an_optimizer_is_refused_where_its_rate_is_tuned():
    def scheduled(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        return optimizer

    with pytest.raises(ValueError, match="pass the scheduler as scheduler="):
        tuned(names=["learning_rate"], optimizer=scheduled)


def scaled(factor):
    return lambda output, y: factor * F.cross_entropy(output, y)


class Weighed:
    """A callable loss that also has a loss method."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, output, y):
        return self.factor * F.cross_entropy(output, y)

    method = __call__


def with_global(factor):
    """Return a loss that reads a global variable with this value."""
    scope = {"F": F, "FACTOR": factor}
    exec("def loss(output, y): return FACTOR * F.cross_entropy(output, y)", scope)
    return scope["loss"]


def nested(factor):
    """Return a loss that calls another loss with this factor."""
    inner = scaled(factor)
    return lambda output, y: inner(output, y)


def shifted(value):
    network = classifier()
    network.shift = value
    return network


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.inner = classifier()

    def forward(self, x):
        return self.inner(x)


class Tripled(Times):
    def forward(self, x):
        return self.inner(x) * 3


Tripled.__name__ = "Times"  # as if its code had been changed


def frozen(layer):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4, 4), nn.Linear(4, 3))
    network[layer].requires_grad_(False)
    return network


class Stepping(torch.optim.SGD):
    """An optimizer with an additional attribute."""

    def __init__(self, parameters, factor):
        super().__init__(parameters, lr=0.1)
        self.factor = factor


def stepping(factor):
    return lambda parameters: Stepping(parameters, factor)


def changed(values, by):
    """Return a copy in which one of many values differs."""
    values = values.clone()
    values[150] = (values[150] + by) % 3
    return values


MANY = labelled(300)


@pytest.mark.cases(usual=8)
@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({"loss": scaled(1.0)}, {"loss": scaled(2.0)}),
        ({"loss": lambda o, y: F.cross_entropy(o, y)}, {"loss": lambda o, y: F.multi_margin_loss(o, y)}),
        ({"loss": nn.CrossEntropyLoss()}, {"loss": nn.CrossEntropyLoss(label_smoothing=0.3)}),
        ({"loss": Weighed(1.0)}, {"loss": Weighed(2.0)}),
        ({"loss": Weighed(1.0).method}, {"loss": Weighed(2.0).method}),
        ({"loss": nested(1.0)}, {"loss": nested(2.0)}),
        ({"loss": functools.partial(nested(1.0))}, {"loss": functools.partial(nested(2.0))}),
        ({"loss": with_global(1.0)}, {"loss": with_global(2.0)}),
        ({"network": shifted(1)}, {"network": shifted(2)}),
        ({"network": Times(1)}, {"network": Tripled(1)}),
        ({"network": frozen(0)}, {"network": frozen(3)}),
        ({"optimizer": stepping(1.0)}, {"optimizer": stepping(2.0)}),
        ({"data": Rows(X, Y)}, {"data": Rows(2 * X, Y)}),
        ({"data": Rows(X, Y)}, {"data": Rows(X, 2 - Y)}),
        ({"data": MANY}, {"data": (MANY[0], changed(MANY[1], 1))}),
        ({"data": MANY}, {"data": (changed(MANY[0], 0.5), MANY[1])}),
    ],
)
def test_a_file_of_other_data_or_of_a_function_of_other_values_is_refused(tmp_path, first, other):
    path = tmp_path / "search.pt"
    options = {"resume_from": path, "names": ["dropout"], "steps": 2}
    values = tuned(**options, **first).values
    assert tuned(**options, **first).values == values
    with pytest.raises(ValueError, match="is of another search"):
        tuned(**options, **other)


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("proportions", [(0.8, 0.2), (0.8, 0.1, 0.1)])
@pytest.mark.parametrize("names", [["dropout", "learning_rate"], [hyper.Affine()], [hyper.InputMask(6)]])
def test_the_default_device_may_be_another(names, proportions):
    network = nn.Sequential(nn.Flatten(), nn.Linear(36, 3), nn.Dropout(0.1))
    data, slow = (torch.rand(60, 1, 6, 6), Y), functools.partial(torch.optim.SGD, lr=0.1)
    with torch.device("meta"):
        assert tuned(network, data, names, proportions=proportions, optimizer=slow).model(data[0]).shape == (60, 3)


def test_the_label_smoothing_of_a_loss_is_the_untuned_one():
    result = tuned(names=["label_smoothing"], loss=nn.CrossEntropyLoss(label_smoothing=0.3))
    assert result.history[0].values["label_smoothing"] == pytest.approx(0.3)


def test_random_states_gradients_and_data_are_left_alone():
    network = classifier()
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    tuned(network, Rows(X, Y, noise=True))
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (numpy.random.get_state()[1] == states[2]).all()
    x = X.clone().requires_grad_()
    result = tuned(data=(x, Y))
    assert x.grad is None and all(parameter.grad is None for parameter in result.model.parameters())
    frozen = X.numpy().copy()
    frozen.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned(data=(frozen, Y.numpy()))


def test_chunks_keep_the_share_of_a_rare_class():
    y = torch.zeros(60, dtype=torch.long)
    y[:5] = 1
    seen = []
    tuned(
        classifier(2), (X, y), ["weight_decay"], stratify=y,
        callbacks=[lambda training: seen.append(y[training.problem.chunks.indices(2)].sum().item())],
    )  # fmt: skip
    assert set(seen) == {1}


def test_the_report_has_the_unseen_targets_and_the_means_that_decide():
    result = tuned(steps=20)
    assert f"nats of {result.counted} unseen targets" in result.report() and result.counted == 12
    late = result.history[0].nats[5:]
    assert f"{-sum(late) / 5:.1f}" in result.report().splitlines()[4]
    assert any(note.startswith("The cost of") for note in tuned(steps=4, batch_size=4, budget=6).notes)


def test_targets_that_are_probabilities_have_a_cross_entropy():
    losses = set()
    tuned(data=(X, torch.randn(60, 3).softmax(1)), callbacks=[lambda training: losses.add(training.loss)])
    assert losses == {F.cross_entropy}


def test_a_learning_rate_at_the_end_of_what_was_tried_has_a_note():
    slow = functools.partial(torch.optim.Adam, lr=2e-3)
    notes = tuned(data=labelled(400), names=["learning_rate"], steps=40, optimizer=slow).notes
    assert any(note.startswith("learning_rate was best at the end of what was tried; pass 0.0") for note in notes)


def test_the_note_of_a_learning_rate_has_the_one_that_was_best():
    """Check the note, although a training with much dropout at the given rate has most of the weight."""
    problem = make_problem(
        classifier(), (X, Y), ["dropout", "learning_rate"], steps=5, batch_size=8, optimizer=FAST, seed=0
    )
    rates = [(0.1, 0.03, 0.1), (0.9, 0.03, 0.8), (0.1, 0.006, 0.1), (0.1, 0.15, 0.9)]
    history = [Trial({"dropout": p, "learning_rate": rate}, [1.0], 8, weight, 0.2) for p, rate, weight in rates]
    notes = list(notes_of_choice(problem, history, torch.zeros(2)))
    assert "learning_rate was best at the end of what was tried; pass 0.15 and tune it again." in notes


class Scaled(nn.Module):
    """A loss with a trainable parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output, y):
        return self.scale * F.cross_entropy(output, y)


class Locked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.generator = classifier(), (i for i in range(3))

    def forward(self, x):
        return self.inner(x)


def traced():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(classifier().eval(), X)


ONE_HOT = F.one_hot(Y, 3).float()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss": Scaled()}, ValueError, "the loss has 1 parameters that are not in the network"),
        ({"network": nn.Sequential(classifier(1), nn.Sigmoid()), "data": (X, (X[:, :1] > 0).float())}, ValueError,
         "ends in nn.Sigmoid, and binary_cross_entropy_with_logits takes logits"),
        ({"data": (X, ONE_HOT)}, ValueError, r"has a single one: pass y\.argmax\(1\)"),
        ({"data": (MANY[0], MANY[1].index_fill(0, torch.tensor([150]), 3))}, ValueError,
         "labels are 0 to 3, and the network has 3"),
        ({"data": (X.to_sparse(), Y)}, TypeError, "layout torch.sparse_coo; pass dense ones"),
        ({"data": (X.numpy(), numpy.array(["a", "b"] * 30))}, TypeError, "an array of <U1; pass numbers"),
        ({"network": classifier().to("meta")}, ValueError, "on the meta device, without numbers"),
        ({"device": "meta"}, ValueError, "device='meta' has no numbers"),
        ({"device": "nowhere"}, ValueError, "device='nowhere' cannot be used here"),
        ({"network": nn.LazyLinear(3)}, ValueError, "lazy modules without parameters; call it once"),
        ({"network": nn.Embedding(9, 4), "data": (Y[:, None].expand(60, 4), Y[:, None].expand(60, 4))}, ValueError,
         r"either the second or the last dimension may be the classes; pass loss="),
        ({"data": Rows(X, Y.int())}, ValueError, r"labels are torch\.int32; pass labels\.long\(\)"),
        ({"data": Rows(X.double(), Y)}, ValueError, r"The network has torch\.float32: pass x\.to\(torch\.float32\)"),
        ({"network": classifier(1), "data": (X, X[:, 0]), "loss": lambda o, y: (o - y).square().mean()}, ValueError,
         r"it broadcasts them; pass targets\.unsqueeze\(1\)"),
        ({"data": [{"image": x, "table": x, "label": y} for x, y in zip(X, Y, strict=True)],
          "names": [hyper.Affine()]}, ValueError, r"put them into it, such as hyper\.InTraining\(hyper\.Affine"),
        ({"network": traced()}, TypeError, r"compiled by torch\.jit"),
        ({"network": partnets.partition(classifier(), (0.8, 0.2))}, ValueError, "is partitioned; pass the plain one"),
        ({"network": Locked()}, ValueError, "network cannot be copied"),
        ({"budget": "2"}, ValueError, "budget='2'; pass a number above 1"),
        ({"resume_from": 3}, TypeError, "resume_from is a int; pass the path"),
        ({"collate": 3}, TypeError, "collate is of type int; pass a function"),
        ({"forward": lambda network, batch: network(batch[0])}, ValueError, "forward returned a Tensor; return the"),
        ({"names": ["learning_rate"], "optimizer": functools.partial(torch.optim.SGD, lr=0.0)}, ValueError,
         "has a learning rate of 0; pass one above 0"),
        ({"names": ["weight_decay"], "optimizer": functools.partial(torch.optim.AdamW, lr=0.0)}, ValueError,
         "a learning rate of 0, with which its weight decay does nothing"),
    ],
)  # fmt: skip
def test_what_cannot_be_tuned_is_refused_before_training(options, error, message):
    options = copy.copy(options)
    with pytest.raises(error, match=message):
        tuned(options.pop("network", None), callbacks=[lambda _: pytest.fail("it trained")], **options)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_call_without_gradients_is_refused(context):
    with context(), pytest.raises(RuntimeError, match="gradients are disabled here"):
        tuned()
    with torch.autocast("cpu"), pytest.raises(RuntimeError, match=r"within torch\.autocast"):
        tuned()
