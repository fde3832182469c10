"""tune with modules that learn by gradient descent: augmentations, masks and other changes of the inputs."""

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from small_calls import WITHOUT_RATES, Rows, X, classifier, pictures, tuned, weights
from torch import nn

import partnets
from partnets import hyper
from partnets.tuning.loss import SPREAD, TEMPERATURES, best_temperature
from partnets.tuning.training import STARTS, Training


@pytest.fixture
def one_start(monkeypatch):
    """Let augmentations keep their first widths, although they learn nothing from random labels."""
    monkeypatch.setattr("partnets.tuning.run.STARTS", STARTS[:1])
    monkeypatch.setattr(Training, "shrank", lambda self: False)


@pytest.mark.usefixtures("one_start")
def test_augmentations_learn_at_the_chosen_values_and_the_final_training_repeats_their_schedule():
    seen = []

    def look(training):
        seen.append((training.is_judged, training.network[0].training, training.network[0].module.values()))

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
    assert [type(module) for module in result.model] == [nn.Flatten, nn.Dropout, nn.Linear]


def test_predictions_by_augmented_copies_are_offered():
    (network, data), x = pictures(), torch.rand(7, 1, 6, 6)
    result = tuned(network, data, [hyper.Affine(), "dropout"], steps=10)
    hyper.assign(result.augmentation[0], {"rotation": 120.0, "scale": 0.4})
    averaged, few = result.averaged(64), result.averaged(4)
    assert torch.equal(averaged(x), averaged(x)) and not torch.equal(averaged(x), few(x))
    torch.testing.assert_close(few(x[:3]), few(x)[:3])  # products of three rows may round differently
    expected = torch.stack([result.model(result.augmentation(x)) for _ in range(400)]).mean(0)
    assert (averaged(x) - expected).abs().mean() < 0.5 * (result.model(x) - expected).abs().mean()


def test_averages_are_over_augmentations_that_come_first():
    network, data = pictures()
    filtered = hyper.Submodule(nn.Conv2d(1, 1, 3, padding=1))
    assert tuned(network, data, [hyper.Affine(), filtered]).averaged(2)(data[0]).shape == (40, 2)
    for result in (tuned(), tuned(network, data, [filtered, hyper.Affine()])):
        with pytest.raises(ValueError, match="no augmentation before the network was tuned"):
            result.averaged(2)


@pytest.mark.full
def test_a_note_says_if_augmented_copies_predict_better():
    images, labels = torch.randn(60, 1, 6, 6), torch.randint(2, (60,))
    noisy = nn.Sequential(nn.Flatten(), nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = functools.partial(torch.optim.Adam, lr=0.02)
    result = tuned(noisy, (images, labels), [hyper.Affine()], steps=100, optimizer=optimizer, seed=3)
    assert any("Predictions by the mean over 8 augmented copies have a higher L_ML" in note for note in result.notes)


def test_only_unseen_examples_teach_augmentations():
    """Negate the images of one chunk: only those of the unseen chunk may change the learned widths."""
    network, (images, labels) = pictures()

    def schedule(chunk):
        changed = images.clone()
        changed[partnets.chunk((images, labels), (0.8, 0.2), seed=3).indices(chunk) if chunk else []] *= -1
        return tuned(network, (changed, labels), [hyper.Affine()], steps=20, optimizer=WITHOUT_RATES).schedule

    assert schedule(1) == schedule(None) != schedule(2)


def test_augmentations_learn_the_same_whatever_holds_the_labels():
    network, (images, labels) = pictures()
    options = {"names": [hyper.Affine()], "steps": 20}
    plain = tuned(network, (images, labels), loss=lambda output, y: F.cross_entropy(output, y), **options)
    pairs = Rows(images, [[label] for label in labels])
    listed = tuned(network, pairs, loss=lambda output, y: F.cross_entropy(output, y[0]), **options)
    assert listed.schedule == plain.schedule


@pytest.mark.usefixtures("one_start")
def test_widths_stay_in_their_ranges():
    """Use a loss that always rewards more contrast."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(108, 2))
    data = torch.rand(40, 3, 6, 6), torch.randint(2, (40,))
    jitter = hyper.ColourJitter(saturation=None, hue=None)

    def loss(output, y):
        return -output.square().mean().clamp(max=1e3)

    result = tuned(network, data, [jitter], steps=100, loss=loss, optimizer=torch.optim.Adam)
    assert max(result.schedule["contrast"] + result.schedule["brightness"]) == pytest.approx(0.7, rel=1e-2)


@pytest.mark.usefixtures("one_start")
def test_widths_begin_positive_and_in_short_trainings_narrow():
    long, short = (tuned(*pictures(), [hyper.Affine()], steps=steps) for steps in (160, 20))
    assert long.schedule["rotation"][0] == pytest.approx(72.0) and min(long.schedule["rotation"]) > 0
    assert short.schedule["rotation"][0] == pytest.approx(72.0 * 15 / 110)
    note = "Widths of augmentations learn in so few steps only a little"
    assert any(note in each for each in short.notes) and not any(note in each for each in long.notes)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(1), nn.InstanceNorm2d(1, track_running_stats=True)])
def test_statistics_of_normalisation_are_of_images_without_augmentation(norm):
    network = nn.Sequential(norm, nn.Flatten(), nn.Linear(36, 2))
    images = 5 + torch.rand(60, 1, 6, 6)  # augmentation shifts zeros into the images
    result = tuned(network, (images, torch.randint(2, (60,))), [hyper.Affine()], steps=20)
    assert result.model[0].running_mean.item() == pytest.approx(images.mean().item(), abs=0.05)
    assert result.model[0].momentum == 0.1


class Shifts(hyper.augmentation.Augmentation):
    """An augmentation with its width in a submodule."""

    def __init__(self):
        super().__init__({"shift": 0.1})
        self.inner = nn.ModuleDict({"shift": hyper.Learned(0.1, hyper.positive)})

    def transform(self, x, draws):
        return x + self.inner["shift"](x) * draws[:, :, None, None]


class Reversed(nn.Sequential):
    """A user-defined Sequential that begins with an Identity."""

    def forward(self, x):
        return super().forward(x.flip(3))


def test_augmentations_may_be_anywhere_and_are_taken_off_again():
    (network, data), affine = pictures(), hyper.Affine()
    result = tuned(network, data, [Shifts(), "dropout"], steps=4)
    assert set(result.schedule) == {"inner.shift"} and result.values["inner.shift"] > 0
    result = tuned(Reversed(nn.Identity(), *network), data, [affine], steps=4)
    assert type(result.model) is Reversed and len(result.model) == 4
    for around in (
        hyper.Averaged(affine, network, samples=2),
        nn.Sequential(inside := hyper.InTraining(affine), *network),
    ):
        given = inside if isinstance(around, nn.Sequential) else affine
        assert "rotation" in tuned(around, data, [given], steps=4).schedule


def test_images_of_bytes_are_augmented_before_a_network_that_takes_them():
    images, labels = torch.randint(256, (40, 1, 6, 6), dtype=torch.uint8), torch.randint(2, (40,))
    network = nn.Sequential(partnets.data.ToFloat(), nn.Flatten(), nn.Linear(36, 2))
    result = tuned(network, (images, labels), [hyper.Affine()])
    assert len(result.model) == 3 and torch.equal(result.model(images), result.model(images / 255))
    assert result.averaged(2)(images).shape == (40, 2)
    masked = tuned(network, (images, labels), [hyper.Affine(), hyper.InputMask(6)])
    assert torch.allclose(masked.model(images), masked.model(images / 255))


@pytest.mark.parametrize("make", [hyper.InputNoise, hyper.Cutout])
def test_modules_that_act_in_training_are_searched(make):
    images, labels = torch.rand(40, 3, 6, 6), torch.randint(2, (40,))
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2))
    result = tuned(network, (images, labels), [make()])
    assert len(result.history) > 2 and set(result.history[0].values) == set(result.values)
    assert type(result.model[0]) is nn.Conv2d


def test_modules_that_act_in_prediction_learn_by_gradient_in_the_training_at_the_chosen_values():
    x, mask = torch.randn(80, 4), hyper.InputMask(4)
    before = copy.deepcopy(mask.state_dict())
    data = x, (x[:, 0] > 0).long()
    result = tuned(nn.Sequential(mask, classifier()), data, [mask, "weight_decay"], steps=60)
    assert result.values["0"] > max(result.values[str(i)] for i in (1, 2, 3))
    assert all(torch.equal(mask.state_dict()[name], value) for name, value in before.items())


def test_modules_that_act_in_prediction_stay_before_the_network():
    result = tuned(names=[hyper.InputMask(4), hyper.Submodule(nn.Linear(4, 4))], steps=20)
    assert len(result.model) == 3 and isinstance(result.model[1], nn.Linear)
    assert not torch.equal(result.model(X), result.model[2](X))
    mask = torch.tensor([result.values[name] for name in sorted(result.values)[:4]])
    assert mask.shape == (4,)
    wider = tuned(nn.Linear(6, 3), names=["weight_decay", hyper.Submodule(nn.Linear(4, 6))], steps=8)
    assert wider.model(X).shape == (60, 3)


def test_many_numbers_that_unseen_examples_train_have_a_note_and_weights_the_rate_of_weights():
    torch.manual_seed(0)
    x = torch.randn(520, 5)
    y = (x[:, 0] + torch.randn(520) > 0).long()
    extractor = hyper.Submodule(nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 8)))
    network, data = nn.Sequential(extractor, nn.ReLU(), nn.Linear(8, 2)), (x[:120], y[:120])
    result = tuned(network, data, [extractor], steps=300, batch_size=32, optimizer=torch.optim.Adam, seed=0)
    assert any(note.startswith("456 numbers learned by gradient descent from 24 unseen") for note in result.notes)
    assert F.cross_entropy(result.model(x[120:]), y[120:]) < 0.69


OPTIONS = {"steps": 100, "batch_size": 32, "optimizer": functools.partial(torch.optim.Adam, lr=0.01)}


def noisy():
    """Return images with a third of the labels random, so that a network that fits them is overconfident."""
    torch.manual_seed(0)
    x = torch.rand(200, 1, 6, 6)
    y = x[:, 0, :2, 0].argmax(1)
    return x, torch.where(torch.rand(200) < 1 / 3, torch.randint(2, (200,)), y)


def overconfident(*shape):
    torch.manual_seed(1)
    layers = nn.Flatten(), nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, math.prod(shape))
    return nn.Sequential(*layers, nn.Unflatten(1, shape))


def losses_of(kind):
    """Return a network, data, and a function that sums the losses of outputs."""
    x, y = noisy()
    if kind == "tokens":
        loss = lambda output, y: F.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="sum")  # noqa: E731
        return overconfident(5, 3), (x, y[:, None].repeat(1, 5)), loss
    if kind == "several labels":
        y = F.one_hot(y).float().index_fill(0, torch.arange(0, len(y), 9), 1.0)
        return overconfident(2), (x, y), functools.partial(F.binary_cross_entropy_with_logits, reduction="sum")
    return overconfident(2), (x, y), functools.partial(F.cross_entropy, reduction="sum")


@pytest.mark.usefixtures("one_start")
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
def test_other_trainings_are_evaluated_at_temperature_1(tuned, loss):
    """Check temperature 1 without augmentations, where overconfidence must count, and with custom losses."""
    x, y = noisy()
    x = x.flatten(1) if isinstance(tuned, hyper.InputMask) else x
    temperatures = []
    callbacks = [lambda training: temperatures.append(training.temperature)]
    partnets.tune(overconfident(2), (x, y), tuned, loss=loss, **OPTIONS | {"steps": 20}, callbacks=callbacks)
    assert set(temperatures) == {1.0}


@pytest.mark.usefixtures("one_start")
def test_widths_learn_from_logits_at_the_temperature_of_the_last_judgement(monkeypatch):
    used, judged = [], []
    callbacks = [lambda training: judged.extend([training.temperature] * bool(training.direct))]
    tuned = functools.partial(partnets.tune, overconfident(2), noisy(), hyper.Affine(), **OPTIONS)
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
    assert best_temperature(nats) == pytest.approx((value, temperature), rel=2e-3)


def arrows(number=60):
    """Return a network and images of an arrow in one of four directions, which rotations change."""
    generator, place = torch.Generator().manual_seed(0), torch.linspace(-1, 1, 8)
    arrow = (place.abs() < (place[:, None] + 1) / 2).float()
    labels = torch.randint(4, (number,), generator=generator)
    images = torch.stack([torch.rot90(arrow, int(label)) for label in labels])[:, None]
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    return network, (images + 1.5 * torch.randn(images.shape, generator=generator), labels)


def check_resumed(result, options, path):
    """Interrupt a search in its second check, and compare the result of the same call, which continues it."""
    calls = []

    def interrupt(training):
        calls.append(training)
        if len(calls) == 10 * len(result.history) + 13:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned(**options, callbacks=interrupt, resume_from=path)
    again = tuned(**options, resume_from=path)
    assert again.schedule == result.schedule and torch.equal(weights(again.model), weights(result.model))


def test_augmentations_that_do_harm_begin_again_from_smaller_widths(monkeypatch, tmp_path):
    optimizer = functools.partial(torch.optim.Adam, lr=3e-3)
    network, data = arrows()
    options = {"names": [hyper.Affine(), "weight_decay"], "steps": 160, "optimizer": optimizer, "seed": 0}
    options |= {"network": network, "data": data}
    result = tuned(**options)
    assert result.schedule["rotation"][0] < 20 and result.values["rotation"] < 10
    assert any("Augmentations from 0.4 of their ranges did harm" in note for note in result.notes)
    check_resumed(result, options, tmp_path / "search")
    monkeypatch.setattr("partnets.tuning.run.STARTS", STARTS[:1])
    assert tuned(**options).lml < result.lml


def test_widths_that_shrank_begin_again_as_they_were_learned(monkeypatch, tmp_path):
    network, data = arrows(300)
    options = {"network": network, "data": data, "names": [hyper.Affine()], "steps": 160, "batch_size": 16}
    options |= {"optimizer": functools.partial(torch.optim.Adam, lr=3e-3), "seed": 0}
    result = tuned(**options)
    assert result.schedule["rotation"][0] < 10
    assert any("began at the widths that a first check had learned" in note for note in result.notes)
    check_resumed(result, options, tmp_path / "search")
    monkeypatch.setattr(Training, "shrank", lambda self: False)
    first = tuned(**options)
    assert first.lml < result.lml - 5
