"""tune: complete calls and their results, unchanged arguments, and resumption with the same bits."""

import copy
import functools
import math

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import partnets
from partnets import hyper
from partnets.tuning.training import Training


def classifier(classes=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, classes))


def labelled(n=60, classes=3):
    torch.manual_seed(1)
    x = torch.randn(n, 4)
    return x, x[:, :classes].argmax(1)


X, Y = labelled()


class Filled(nn.Module):
    def forward(self, x):
        return x.nan_to_num()


def with_nan(x):
    return torch.cat([x[:-1], torch.full_like(x[:1], math.nan)])


def flat():
    """Return a network with outputs [n]."""
    return nn.Sequential(classifier(1), nn.Flatten(0))


def tuned(network=None, data=None, names=("dropout", "weight_decay"), **options):
    fast = functools.partial(torch.optim.Adam, lr=0.03)  # better than guessing after 6 steps
    options = {"steps": 6, "batch_size": 16, "seed": 3, "optimizer": fast} | options
    return partnets.tune(network or classifier(), labelled() if data is None else data, list(names), **options)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_network_and_random_states_are_left_unchanged():
    network, data = classifier(), labelled()
    before, state = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    result = tuned(network, data)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert network.training and torch.equal(torch.get_rng_state(), state)
    assert not set(network.parameters()) & set(result.model.parameters())


def test_the_result_is_a_network_of_torch_with_the_values():
    result = tuned()
    assert type(result.model) is nn.Sequential and not result.model.training
    assert result.model[2].p == result.values["dropout"]
    assert not torch.equal(weights(result.model), weights(classifier()))
    assert len(result.history) == 4 and math.isclose(sum(t.weight for t in result.history), 1.0)
    assert result.history[0].values == {"dropout": 0.0, "weight_decay": 0.0}


def test_the_same_seed_gives_the_same_result_and_another_one_does_not():
    first, again, other = tuned(), tuned(), tuned(seed=4)
    assert torch.equal(weights(first.model), weights(again.model)) and first.values == again.values
    assert first.values != other.values


def test_the_cost_is_what_the_trainings_took():
    result = tuned(steps=40)
    assert 1.9 < result.cost < 2.4  # evaluations of 12 examples at each tenth; 640 trained ones
    network, data = pictures()
    for names in ([hyper.Affine()], [hyper.Affine(), "dropout"]):
        assert 1.7 < tuned(network, data, names, steps=60).cost < 2.2


class Killed(Exception):
    pass


def pictures():
    network = nn.Sequential(nn.Flatten(), nn.Dropout(0.0), nn.Linear(36, 2))
    torch.manual_seed(2)
    return network, (torch.rand(40, 1, 6, 6), torch.randint(2, (40,)))


@pytest.mark.cases(usual=2)
@pytest.mark.parametrize(
    ("names", "tenths"),
    [
        *((("dropout", "label_smoothing", "learning_rate"), tenths) for tenths in (3, 17, 62, 74)),
        *(((hyper.Affine(), "dropout"), tenths) for tenths in (34, 42)),
    ],
)
def test_an_interrupted_search_resumes_to_the_same_bits(tmp_path, names, tenths):
    path, calls = tmp_path / "search.pt", []

    def kill(training):
        calls.append(training.done)
        if len(calls) == tenths:
            raise Killed

    options = {"steps": 20, "names": names}
    if "learning_rate" not in names:
        options["network"], options["data"] = pictures()
    whole = tuned(**options)
    with pytest.raises(Killed):
        tuned(**options, resume_from=path, callbacks=[kill])
    result = tuned(**options, resume_from=path)
    assert torch.equal(weights(result.model), weights(whole.model))
    assert (result.values, result.lml, result.steps, result.cost) == (whole.values, whole.lml, whole.steps, whole.cost)
    assert result.history == whole.history


def test_a_search_that_is_killed_after_its_last_judgement_knows_of_how_many_it_was(tmp_path, monkeypatch):
    guessed = Training.guessed_nats

    def kill(training, judging=None):
        if judging is None:  # unseen data, after the last evaluation
            raise Killed
        return guessed(training, judging)

    whole = tuned(steps=20)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Training, "guessed_nats", kill)
        tuned(steps=20, resume_from=tmp_path / "search.pt")
    result = tuned(steps=20, resume_from=tmp_path / "search.pt")
    assert result.counted == whole.counted > 0 and result.values == whole.values


def test_a_file_of_another_search_is_refused(tmp_path):
    path = tmp_path / "search.pt"
    tuned(resume_from=path)
    with pytest.raises(ValueError, match="is of another search: the network, the data or an argument differs"):
        tuned(resume_from=path, seed=5)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"is not a file of partnets\.tune"):
        tuned(resume_from=path)


def test_a_finished_search_is_not_run_again(tmp_path):
    path, calls = tmp_path / "search.pt", []
    first = tuned(resume_from=path)
    again = tuned(resume_from=path, callbacks=[lambda training: calls.append(1)])
    assert not calls and torch.equal(weights(first.model), weights(again.model))


def test_examples_of_the_unseen_chunk_do_not_reach_the_weights_of_the_search():
    """Poison the unseen examples, which may change evaluations but no trained weights."""
    x, y = labelled()
    found = []
    for poison in (0.0, 100.0):
        unseen = partnets.chunk((x, y), (0.8, 0.2), seed=3).indices(2)
        poisoned = x.clone()
        poisoned[unseen] += poison
        seen = []

        def look(training, seen=seen):
            if training.is_judged and len(seen) < 4:
                seen.append(weights(training.network))

        tuned(data=(poisoned, y), callbacks=[look])
        found.append(torch.stack(seen))
    assert torch.equal(*found)


@pytest.mark.parametrize("proportions", [(0.8, 0.1, 0.1), (0.6, 0.1, 0.1, 0.1, 0.1)])
def test_more_chunks_partition_the_network(proportions):
    partitioned = []
    result = tuned(proportions=proportions, callbacks=[lambda training: partitioned.append(training.partitioned)])
    assert any(partitioned) and type(result.model[0]) is nn.Linear


def test_a_squared_error_counts_by_its_logarithm_whatever_the_chunks():
    x, _ = labelled()
    for proportions in ((0.8, 0.2), (0.8, 0.1, 0.1)):
        large = tuned(classifier(1), (x, 100 * x[:, :1]), ["weight_decay"], proportions=proportions)
        assert -12 / 2 * math.log(2e4) < large.lml < -12 / 2 * math.log(1e3)
    twice = tuned(classifier(2), (x, 100 * x[:, :1].expand(60, 2)), ["weight_decay"])
    assert twice.lml == pytest.approx(2 * large.lml, rel=0.1)  # two numbers per example


@pytest.mark.parametrize(
    ("loss", "is_noted"),
    [
        (nn.HuberLoss(), True),
        (nn.functional.l1_loss, True),
        (nn.MSELoss(), False),
        (lambda a, b: (a - b).abs().mean(), False),
    ],
)
def test_losses_of_torch_that_are_not_in_nats_have_a_note(loss, is_noted):
    x, _ = labelled()
    notes = tuned(classifier(1), (x, x[:, :1]), ["weight_decay"], loss=loss, steps=30).notes
    assert any("no negative log-likelihood" in note for note in notes) == is_noted


def test_equally_good_trainings_have_a_note_that_says_no_more():
    notes = tuned(names=["weight_decay"], steps=40, optimizer=functools.partial(torch.optim.SGD, lr=0.1)).notes
    assert any(note.startswith("Unseen data do not tell the trainings of the search apart") for note in notes)


def test_kinds_of_targets_choose_the_loss():
    x, y = labelled()
    several = (x > 0).float()[:, :3]
    for targets, outputs in ((y, 3), (several, 3), (x[:, :1], 1)):
        result = tuned(classifier(outputs), (x, targets), ["weight_decay"])
        assert math.isfinite(result.lml)
    tokens = torch.randint(5, (40, 7))
    language = nn.Sequential(nn.Embedding(5, 8), nn.Dropout(0.0), nn.Linear(8, 5))
    assert math.isfinite(tuned(language, (tokens, tokens)).lml)


def test_counts_of_which_a_batch_has_zeros_alone_are_a_regression():
    x, _ = labelled()
    y = torch.zeros(60, 1)
    y[::20] = 7.0
    losses = []
    tuned(classifier(1), (x, y), ["weight_decay"], callbacks=[lambda training: losses.append(training.loss)])
    assert set(losses) == {nn.functional.mse_loss}


def test_arrays_and_datasets_are_data():
    x, y = labelled()
    expected = weights(tuned().model)
    for data in ((x.numpy().astype(numpy.float64), y.numpy()), TensorDataset(x, y)):
        assert torch.equal(weights(tuned(data=data).model), expected)


def test_augmentations_go_before_the_network_and_are_not_deployed():
    images, labels = torch.rand(40, 1, 6, 6), torch.randint(2, (40,))
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(64, 2))
    result = tuned(network, (images, labels), [hyper.Affine()])
    assert [type(module) for module in result.model] == [nn.Conv2d, nn.Flatten, nn.Linear]
    assert 0 < result.values["rotation"] < 180


def widths(training):
    return training.network[0].module.values()


def test_augmentations_learn_at_the_chosen_values_and_the_final_training_repeats_their_schedule():
    seen = []

    def look(training):
        seen.append((training.is_judged, training.network[0].training, widths(training)))

    result = tuned(*pictures(), [hyper.Affine(), "dropout"], steps=40, callbacks=[look])
    tried = 10 * len(result.history)
    search, chosen, final = seen[:tried], seen[tried : tried + 10], seen[tried + 10 :]
    assert not any(acts for _, acts, _ in search) and all(acts for _, acts, _ in chosen + final)
    assert [judged for judged, *_ in seen] == [True] * (tried + 10) + [False] * len(final)
    for (_, _, learned), (_, _, repeated) in zip(chosen, final, strict=False):
        assert repeated == pytest.approx(learned, rel=1e-5)
    turns = result.schedule["rotation"]
    begun = 72.0 * 30 / 110  # initial width for 30 steps of widths
    assert turns[:3] == pytest.approx([begun] * 3) and len(turns) == len(final) + 1
    assert turns[-1] == result.values["rotation"] == pytest.approx(final[-1][2]["rotation"]) != pytest.approx(begun)
    assert "at the start 19.6" in result.report() and set(result.history[0].values) == {"dropout"}


def test_predictions_by_augmented_copies_are_offered():
    (network, data), x = pictures(), torch.rand(7, 1, 6, 6)
    result = tuned(network, data, [hyper.Affine(), "dropout"], steps=10)
    hyper.assign(result.augmentation[0], {"rotation": 120.0, "scale": 0.4})
    averaged, few = result.averaged(64), result.averaged(4)
    assert torch.equal(averaged(x), averaged(x)) and not torch.equal(averaged(x), few(x))
    torch.testing.assert_close(few(x[:3]), few(x)[:3])  # products of three rows may round differently
    expected = torch.stack([result.model(result.augmentation(x)) for _ in range(400)]).mean(0)
    assert (averaged(x) - expected).abs().mean() < 0.5 * (result.model(x) - expected).abs().mean()
    with pytest.raises(ValueError, match="no augmentation before the network was tuned"):
        tuned().averaged()


@pytest.mark.full
def test_a_note_says_if_augmented_copies_predict_better():
    images, labels = torch.randn(60, 1, 6, 6), torch.randint(2, (60,))
    noisy = nn.Sequential(nn.Flatten(), nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = functools.partial(torch.optim.Adam, lr=0.02)
    result = tuned(noisy, (images, labels), [hyper.Affine()], steps=100, optimizer=optimizer)
    assert any("Predictions by the mean over 8 augmented copies have a higher L_ML" in note for note in result.notes)


def test_only_unseen_examples_teach_augmentations():
    """Negate the images of one chunk: only those of the unseen chunk may change the learned widths."""
    network, (images, labels) = pictures()
    found = []
    for chunk in (1, 2):
        changed = images.clone()
        changed[partnets.chunk((images, labels), (0.8, 0.2), seed=3).indices(chunk)] *= -1
        frozen = functools.partial(torch.optim.SGD, lr=0.0)
        found.append(tuned(network, (changed, labels), [hyper.Affine()], steps=20, optimizer=frozen).schedule)
    expected = tuned(network, (images, labels), [hyper.Affine()], steps=20, optimizer=frozen).schedule
    assert found[0] == expected and found[1] != expected


class Listed(torch.utils.data.Dataset):
    """A data set of images with labels in lists."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], [self.labels[i]]


def test_augmentations_learn_the_same_whatever_holds_the_labels():
    network, (images, labels) = pictures()
    loss = nn.functional.cross_entropy
    options = {"names": [hyper.Affine()], "steps": 20}
    plain = tuned(network, (images, labels), loss=lambda output, y: loss(output, y), **options)
    listed = tuned(network, Listed(images, labels), loss=lambda output, y: loss(output, y[0]), **options)
    assert listed.schedule == plain.schedule


def test_widths_stay_in_their_ranges():
    """Use a loss that always rewards more contrast."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(108, 2))
    data = torch.rand(40, 3, 6, 6), torch.randint(2, (40,))
    jitter = hyper.ColourJitter(saturation=None, hue=None)

    def loss(output, y):
        return -output.square().mean().clamp(max=1e3)

    result = tuned(network, data, [jitter], steps=100, loss=loss, optimizer=torch.optim.Adam)
    assert max(result.schedule["contrast"] + result.schedule["brightness"]) == pytest.approx(0.7, rel=1e-2)


@pytest.mark.cases(usual=1)
def test_widths_begin_positive_and_in_short_trainings_narrow():
    long, short = (tuned(*pictures(), [hyper.Affine()], steps=steps) for steps in (160, 20))
    assert long.schedule["rotation"][0] == pytest.approx(72.0) and min(long.schedule["rotation"]) > 0
    assert short.schedule["rotation"][0] == pytest.approx(72.0 * 15 / 110)
    note = "Widths of augmentations learn in so few steps only a little"
    assert any(note in each for each in short.notes) and not any(note in each for each in long.notes)


def test_statistics_of_batch_normalisation_are_of_images_without_augmentation():
    network = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(36, 2))
    images = 5 + torch.rand(60, 1, 6, 6)  # augmentation shifts zeros into the images
    result = tuned(network, (images, torch.randint(2, (60,))), [hyper.Affine()], steps=20)
    assert result.model[0].running_mean.item() == pytest.approx(images.mean().item(), abs=0.05)
    assert result.model[0].momentum == 0.1


class Reversed(nn.Sequential):
    """A user-defined Sequential that begins with an Identity."""

    def forward(self, x):
        return super().forward(x.flip(3))


class Shifts(hyper.augmentation.Augmentation):
    """An augmentation with its width in a submodule."""

    def __init__(self):
        super().__init__({"shift": 0.1})
        self.inner = nn.ModuleDict({"shift": hyper.Learned(0.1, hyper.positive)})

    def transform(self, x, draws):
        return x + self.inner["shift"](x) * draws[:, :, None, None]


def test_the_width_of_an_augmentation_may_be_anywhere_inside():
    result = tuned(*pictures(), [Shifts(), "dropout"], steps=4)
    assert set(result.schedule) == {"inner.shift"} and result.values["inner.shift"] > 0


def test_only_modules_that_tune_has_put_there_are_taken_off():
    network, data = pictures()
    result = tuned(Reversed(nn.Identity(), *network), data, [hyper.Affine()], steps=4)
    assert type(result.model) is Reversed and len(result.model) == 4


def test_an_averaged_network_is_tuned():
    network, data = pictures()
    affine = hyper.Affine()
    averaged = hyper.Averaged(affine, network, samples=2)
    assert "rotation" in tuned(averaged, data, [affine], steps=4).schedule


class Undeployable(hyper.Hyperparameter):
    """A hyperparameter without a counterpart in torch."""

    def __init__(self):
        super().__init__()
        self.strength = hyper.Learned(0.5, hyper.positive)

    def forward(self, x):
        return x + self.strength() * torch.randn_like(x)


def test_a_module_that_cannot_be_deployed_is_refused_before_training():
    calls = []
    with pytest.raises(ValueError, match="Undeployable"):
        tuned(names=[Undeployable()], callbacks=calls.append)
    assert not calls


def test_a_file_of_another_module_that_learns_is_refused(tmp_path):
    mask, temperature = hyper.InputMask(4), hyper.Temperature()
    network = nn.Sequential(mask, classifier(), temperature)
    tuned(network, names=[mask], resume_from=tmp_path / "search.pt")
    with pytest.raises(ValueError, match="is of another search"):
        tuned(network, names=[temperature], resume_from=tmp_path / "search.pt")


def test_modules_that_act_in_prediction_learn_by_gradient_in_the_training_at_the_chosen_values():
    x = torch.randn(80, 4)
    mask = hyper.InputMask(4)
    before = copy.deepcopy(mask.state_dict())
    result = tuned(nn.Sequential(mask, classifier()), (x, (x[:, 0] > 0).long()), [mask, "weight_decay"], steps=60)
    assert result.values["0"] > max(result.values[str(i)] for i in (1, 2, 3))
    assert all(torch.equal(mask.state_dict()[name], value) for name, value in before.items())


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
    sizes = []
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 3))
    tuned(network, batch_size=32, callbacks=[lambda training: sizes.append(training.batch_size)])
    assert min(sizes) >= 4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"steps": 0}, ValueError, "steps"),
        ({"budget": 1.0}, ValueError, r"budget=1\.0; pass a number above 1"),
        ({"proportions": (1.0,)}, ValueError, "pass two or more"),
        ({"network": "resnet"}, TypeError, "network is a str"),
        ({"data": labelled()[0]}, TypeError, r"tensors \(x, y\)"),
        ({"data": DataLoader(TensorDataset(*labelled()))}, TypeError, r"pass loader\.dataset.* collate="),
        ({"optimizer": "adam"}, TypeError, r"optimizer is of type str; pass a function of a list of parameters"),
        ({"optimizer": lambda parameters: None}, TypeError, "optimizer returned a NoneType"),
        ({"optimizer": torch.optim.LBFGS, "names": ["dropout"]}, ValueError, "step of LBFGS needs a closure; pass"),
        ({"loss": "cross_entropy"}, TypeError, r"loss is of type str; pass a function of outputs and targets"),
        ({"loss": nn.CrossEntropyLoss}, TypeError, r"loss is the class CrossEntropyLoss; pass .*CrossEntropyLoss\(\)"),
        ({"loss": lambda output, y: output.detach().mean()}, ValueError, "first training step fails: .*require grad"),
        ({"network": nn.LSTM(4, 3), "loss": nn.CrossEntropyLoss()}, ValueError, "first training step fails: .*tuple"),
        ({"forward": 3}, TypeError, "forward is of type int; pass a function of the network and a batch"),
        ({"callbacks": [3]}, TypeError, "callbacks is of type int; pass a function of a training"),
        ({"callbacks": 3}, TypeError, "callbacks is of type int"),
        ({"network": classifier().requires_grad_(False)}, ValueError, "no parameter .* requires a gradient"),
        ({"network": nn.Linear(5, 3)}, ValueError, r"\(16x4 and 5x3\)\. x is \[16, 4\] of torch\.float32"),
        ({"network": nn.Bilinear(4, 4, 3), "data": (X, X, Y)}, ValueError, "an example has 3 parts; .* forward="),
        (
            {"network": nn.Bilinear(4, 4, 3), "data": [((x, x), y) for x, y in zip(X, Y, strict=True)]},
            ValueError,
            r"pass forward=lambda network, batch: \(network\(\*batch\[0\]\), batch\[1\]\)",
        ),
        (
            {"names": [hyper.Affine()]},
            ValueError,
            r"first training step fails.* x is \[\d+, 4\].* Augmentations take images",
        ),
    ],
)
def test_wrong_arguments_are_refused(options, error, message):
    called = []
    with pytest.raises(error, match=message):
        tuned(**({"names": ["weight_decay"], "callbacks": [called.append]} | options))
    assert not called


@pytest.mark.parametrize(
    ("network", "data", "message"),
    [
        (classifier(), (X, Y[:, None]), r"the labels are \[16, 1\], of logits \[16, 3\]; pass labels\.squeeze\(1\)"),
        (classifier(), (X, Y + 1), r"the labels are 1 to 3, and the network has 3 outputs"),
        (classifier(), (X, Y.bool()), r"torch\.bool.*pass labels\.long\(\)"),
        (
            classifier(1),
            (X, Y % 2),
            r"a single output.*pass labels\.float\(\)\.reshape\(-1, 1\).* an output for each class",
        ),
        (classifier(1), (X, (Y % 2)[:, None]), r"a single output.*pass labels\.float\(\) with loss=F\.binary"),
        (classifier(1), (X, Y == 1), r"a single output.*pass labels\.float\(\)\.reshape\(-1, 1\)"),
        (flat(), (X, Y % 2), r"a single output.*pass labels\.float\(\) with loss=F\.binary"),
        (flat(), (X, Y == 1), r"a single output.*pass labels\.float\(\) with loss=F\.binary"),
        (classifier(), (X, X[:, :3] > 0), r"torch\.bool, \[16, 3\].*pass labels\.float\(\)"),
        (classifier(), (X, (X[:, :3] > 0).long()), r"torch\.int64, \[16, 3\].*pass labels\.float\(\)"),
        (classifier(), (with_nan(X), Y), r"1 of 60 examples have NaN or infinite .* loss .* is nan; .*nan_to_num"),
        (classifier(1), (X, with_nan(X[:, :1])), r"1 of 60 examples have NaN"),
        (classifier(1), (X, X[:, 0]), r"mse_loss broadcasts; pass targets\.unsqueeze\(1\)"),
        (nn.Sequential(classifier(), nn.Softmax(1)), (X, Y), "the outputs are probabilities.*leave out the softmax"),
        (nn.Conv2d(1, 2, 3), (torch.rand(60, 8, 8), Y), r"Images need a dimension for their channels: x\.unsqueeze"),
        (nn.Linear(4, 2), (torch.ones(60, 4, dtype=torch.uint8), Y), r"pass x\.float\(\) / 255"),
    ],
)
def test_data_that_do_not_fit_are_refused_before_training(network, data, message):
    with pytest.raises(ValueError, match=message):
        tuned(network, data, ["weight_decay"])


def test_several_labels_as_whole_numbers_are_refused_under_their_loss():
    with pytest.raises(ValueError, match=r"torch\.int64, \[16, 3\].*pass labels\.float\(\)"):
        tuned(classifier(), (X, (X[:, :3] > 0).long()), ["weight_decay"], loss=nn.BCEWithLogitsLoss())


def test_a_distance_does_not_broadcast():
    with pytest.raises(ValueError, match=r"which HuberLoss broadcasts; pass targets\.unsqueeze\(1\)"):
        tuned(classifier(1), (X, X[:, 0]), ["weight_decay"], loss=nn.HuberLoss())


def test_missing_numbers_that_the_network_or_the_loss_leaves_out_are_data():
    def loss(output, y):
        return nn.functional.mse_loss(output[y.isfinite()], y[y.isfinite()])

    assert tuned(nn.Sequential(Filled(), classifier()), (with_nan(X), Y), steps=1).history
    assert tuned(classifier(1), (X, with_nan(X[:, :1])), steps=1, loss=loss).history


def test_a_single_callback_needs_no_list():
    called = []
    tuned(steps=1, callbacks=called.append)
    assert called


def test_report_and_repr_are_short_and_have_the_values(tmp_path):
    result = tuned()
    assert len(repr(result)) < 200 and "dropout=" in repr(result)
    assert "12 unseen examples judged" in result.report() and "tried" in result.report()
    pytest.importorskip("matplotlib")
    result.plot(tmp_path / "search.png")
    assert (tmp_path / "search.png").stat().st_size > 1000


@pytest.mark.cases(usual=2)
@pytest.mark.parametrize(
    "other",
    [
        {"optimizer": functools.partial(torch.optim.SGD, lr=0.5)},
        {"optimizer": functools.partial(torch.optim.Adam, lr=0.5)},
        {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0, 1.0]))},
        {"loss": lambda output, y: 2 * nn.functional.cross_entropy(output, y)},
        {"forward": lambda network, batch: (2 * network(batch[0]), batch[1])},
        {"network": nn.Sequential(*classifier()[:1], nn.Tanh(), *classifier()[2:])},
    ],
)
def test_a_file_of_another_optimizer_loss_forward_or_architecture_is_refused(tmp_path, other):
    path = tmp_path / "search.pt"
    tuned(resume_from=path, names=["dropout"])
    with pytest.raises(ValueError, match="is of another search"):
        tuned(resume_from=path, names=["dropout"], **other)


def test_an_optimizer_of_other_parameters_is_refused():
    network = classifier()
    with pytest.raises(ValueError, match="steps 4 parameters that it was not given"):
        tuned(network, optimizer=lambda _: torch.optim.Adam(network.parameters()))
    with pytest.raises(TypeError, match=r"optimizer is of type Adam; pass a function of a list of parameters"):
        tuned(network, optimizer=torch.optim.Adam(network.parameters()))


@pytest.mark.parametrize("make", [hyper.InputNoise, hyper.Cutout])
def test_modules_that_act_in_training_are_searched(make):
    images, labels = torch.rand(40, 3, 6, 6), torch.randint(2, (40,))
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2))
    result = tuned(network, (images, labels), [make()])
    assert len(result.history) > 2 and set(result.history[0].values) == set(result.values)
    assert type(result.model[0]) is nn.Conv2d


def test_an_augmentation_inside_the_network_is_refused_unless_it_acts_in_training_only():
    images, labels = torch.rand(40, 1, 6, 6), torch.randint(2, (40,))
    affine, rest = hyper.Affine(), [nn.Flatten(), nn.Linear(36, 2)]
    with pytest.raises(
        ValueError, match=r"0 \(Affine\) acts in prediction too; .* hyper\.InTraining\(Affine\(\.\.\.\)\)"
    ):
        tuned(nn.Sequential(affine, *rest), (images, labels), [affine])
    inside = hyper.InTraining(affine)
    assert "rotation" in tuned(nn.Sequential(inside, *rest), (images, labels), [inside]).schedule


def test_mixup_without_its_loss_is_warned_of():
    mixup = hyper.Mixup()
    with pytest.warns(UserWarning, match="acts only in the training loss, but the loss is another one"):
        tuned(names=[mixup])
    assert tuned(names=[mixup], loss=mixup.loss).history


def test_a_frozen_backbone_in_evaluation_mode_stays_as_it_is():
    backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).requires_grad_(False).eval()
    network = nn.Sequential(backbone, nn.Dropout(0.1), nn.Linear(8, 3))
    x, y = labelled()
    result = tuned(network, (3 * x + 5, y), ["dropout"], batch_size=32)
    found, before = result.model[0].state_dict(), backbone.state_dict()
    assert all(torch.equal(found[name], before[name]) for name in before)


def test_numbers_of_the_same_name_are_refused():
    masks = [hyper.InputMask(4), hyper.InputMask(4)]
    with pytest.raises(ValueError, match="several numbers called 0, 1, 2, 3"):
        tuned(nn.Sequential(*masks, classifier()), names=masks)


def test_arrays_take_the_networks_dtype_and_labels_become_int64():
    x, y = labelled()
    assert tuned(classifier().double(), (x.double(), y)).model[0].weight.dtype == torch.float64
    expected = weights(tuned().model)
    assert torch.equal(weights(tuned(data=(x, y.to(torch.int32))).model), expected)


def test_tokens_take_label_smoothing():
    tokens = torch.randint(5, (40, 7))
    language = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))
    assert 0 <= tuned(language, (tokens, tokens), ["label_smoothing"]).values["label_smoothing"] < 0.9


def test_a_norm_to_clip_to_is_checked():
    with pytest.raises(ValueError, match=r"clip=-1\.0"):
        tuned(clip=-1.0)
