"""An audit finds leaks of later chunks into earlier subnetworks, refuses no sound model, and changes nothing."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from layers import dense, perturbed, spoil
from torch import nn
from torch.nn.utils import parametrizations

import partnets
from partnets import hyper
from partnets.evaluation import auditing
from partnets.evaluation.snapshot import Snapshot
from partnets.subnetworks.parameters import partitioned_parameters

PROPORTIONS = (0.5, 0.3, 0.2)
SEEN_LATER = "the model itself computes another output 0"
INACTIVE = "from weights of inactive partitions"


class Around(nn.Module):
    """A layer with custom code after it; subclasses override `made` and `between`."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.made()

    def made(self):
        pass

    def between(self, x):
        return x

    def forward(self, x):
        return self.head(self.between(self.layer(x)))


def model_of(around, **options):
    torch.manual_seed(0)
    return partnets.partition(around(), PROPORTIONS, **options)


def batch(count=12):
    torch.manual_seed(1)
    return torch.randn(count, 6), torch.arange(count) % 3


# Models that read weights of inactive partitions.


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(factor.clone())
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].sum(), None


class Rows(Around):
    """A buffer in which partnets.partition stores the biases of all partitions."""

    def between(self, x):
        return x + 1e-3 * self.layer.bias_rows.sum()


class RowsOfGradient(Around):
    def between(self, x):
        return Twice.apply(x, self.layer.bias_rows)


class MergedAdapter(Around):
    """A low-rank term that evaluation mode adds to a weight, outside of subnetworks."""

    def made(self):
        self.a, self.b, self.is_merged = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.randn(2, 6)), False

    def train(self, mode=True):
        if self.is_merged == mode:
            with torch.no_grad():
                self.layer.weight.add_(self.a @ self.b, alpha=-1 if mode else 1)
            self.is_merged = not mode
        return super().train(mode)

    def between(self, x):
        return x if self.is_merged else x + x @ self.a @ self.b


# Models with state that follows the data.


class RunningMean(Around):
    def made(self):
        self.register_buffer("mean", torch.zeros(6))

    def between(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Teacher(Around):
    """A moving average of the active subnetwork's weights."""

    def made(self):
        self.teacher = [nn.Linear(6, 6).requires_grad_(False)]  # in a list, so it is not registered

    def between(self, x):
        if self.training:
            with torch.no_grad():
                self.teacher[0].weight.lerp_(self.layer.weight, 0.1)
        return x + self.teacher[0](x)


class Frozen(Around):
    """A frozen parameter that forward modifies."""

    def made(self):
        self.center = nn.Parameter(torch.zeros(6, 6), requires_grad=False)

    def between(self, x):
        with torch.no_grad():
            self.center.data[0] += x.mean(0)
        return x - self.center[0]


class MadeForEvaluation(Around):
    """A normalised weight that is cached in evaluation and dropped by train()."""

    kept = None

    def train(self, mode=True):
        self.kept = None
        return super().train(mode)

    def between(self, x):
        if self.training:
            return F.linear(x, F.normalize(self.layer.weight))
        if self.kept is None:
            self.kept = F.normalize(self.layer.weight)
        return F.linear(x, self.kept)


class Stateful(Around):
    """A state that is carried from batch to batch until the mode changes."""

    hidden = 0.0

    def train(self, mode=True):
        self.hidden = 0.0
        return super().train(mode)

    def between(self, x):
        if self.training:
            x = x + self.hidden
            self.hidden = x.detach().mean(0)
        return x


class LastBatch(Around):
    """A normalisation that uses the last training batch's mean in evaluation."""

    def made(self):
        self.register_buffer("mean", torch.zeros(6))

    def between(self, x):
        if self.training:
            self.mean = x.detach().mean(0)
        return x - self.mean


class LastEvaluation(Around):
    """A hook that in training reads a value written in evaluation."""

    def made(self):
        kept = [0.0]

        def hook(layer, args, output):
            if not layer.training:
                kept[0] = output.detach().mean()
            return output - kept[0] if layer.training else output

        self.layer.register_forward_hook(hook)


class Loudest(Around):
    """A running maximum in a hook's variable, only in evaluation mode."""

    def made(self):
        most = 0.0

        def normalise(layer, args, output):
            nonlocal most
            if not layer.training:
                most = max(most, output.abs().amax().item())
            return output / (1 + most)

        self.layer.register_forward_hook(normalise)


LAST = {"mean": 0.0}


class Global(Around):
    """A mean in a global variable, written when gradients are enabled."""

    def between(self, x):
        if torch.is_grad_enabled():
            LAST["mean"] = x.detach().mean(0)
            return x
        return x - LAST["mean"]


class Clipped(Around):
    """A hook of a gradient that remembers the largest norm."""

    def made(self):
        largest = [0.0]

        def clip(grad):
            largest[0] = max(largest[0], grad.norm().item())
            return grad * largest[0]

        self.layer.weight.register_hook(clip)


class PythonRandom(Around):
    def between(self, x):
        return x * sum(random.random() for _ in range(int(x.abs().sum())))


# Models that write into parameters.


class Hebbian(Around):
    """An update of all entries of a weight through named_parameters(), not through the attribute."""

    def between(self, x):
        if self.training:
            with torch.no_grad():
                dict(self.layer.named_parameters())["weight"].data.add_(1e-3 * x.T @ x / len(x))
        return x


class Clamped(Around):
    def between(self, x):
        with torch.no_grad():
            self.head.weight.clamp_(-0.01, 0.01)
        return x


class Backwards(Around):
    """A bias that the backward pass modifies."""

    def between(self, x):
        def decay(grad):
            self.layer._parameters["bias"].data.add_(grad.sum(0), alpha=-0.01)

        if x.requires_grad:
            x.register_hook(decay)
        return x


LEAKS = {
    Rows: f"the model itself computes output 0 {INACTIVE}",
    RowsOfGradient: f"the model itself computes gradient of layer.weight {INACTIVE}",
    MergedAdapter: f"the model itself computes output 0 in evaluation {INACTIVE}",
    RunningMean: "mean follows the data",
    Teacher: "teacher.0.weight follows the data",
    Frozen: "center follows the data",
    MadeForEvaluation: "kept follows the data",
    Stateful: "hidden follows the data",
    LastBatch: "mean follows the data",
    LastEvaluation: "layer._forward_hooks.",
    Loudest: "layer._forward_hooks.",
    Global: f"{SEEN_LATER} in evaluation after later chunks were seen",
    Clipped: "layer.weight.hooks.",
    PythonRandom: "the model itself draws random numbers, and how many depends on the data",
    Hebbian: "layer.weight is changed in a pass",
    Clamped: "head.weight is changed in a pass",
    Backwards: "layer.bias is changed in a pass",
}


@pytest.mark.parametrize("around", LEAKS, ids=lambda around: around.__name__)
def test_a_leak_is_found_and_named_and_the_model_stays_as_it_was(around):
    model, given = perturbed(model_of(around), 0.25), batch()
    twin = dense(model, 1)
    before, drawn = Snapshot(model.train()), torch.get_rng_state()
    found = partnets.audit(model, given, F.cross_entropy)
    assert any(str(leak).startswith(LEAKS[around]) for leak in found), found
    assert all("; " in str(leak) for leak in found)
    assert not before.changed(Snapshot(model)) and torch.equal(torch.get_rng_state(), drawn)
    if "is changed" in LEAKS[around]:
        with partnets.subnetwork(model, 1):  # its default values are as they were
            assert all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.mark.parametrize("around", [Loudest, Clipped])
def test_a_maximum_that_subnetwork_1_exceeds_itself_in_the_trial_is_found(around):
    model = model_of(around)
    partition = partnets.partitions(model)["layer.weight"]
    with torch.no_grad():
        model.layer.weight[partition.mask(2) | partition.mask(3)] *= 0.01
    (leak,) = partnets.audit(model, batch(), F.cross_entropy)
    assert str(leak).startswith(LEAKS[around])


def test_gradients_of_all_partitions_stay_as_they_were():
    model, (x, y) = model_of(Around), batch()
    for k in (1, 3):
        with partnets.subnetwork(model, k, k):
            F.cross_entropy(model(x), y).backward()
    found = partitioned_parameters(model)
    before = [one.gradient(k).clone() for one in found for k in (1, 3)]
    assert partnets.audit(model, (x, y), F.cross_entropy) == []
    after = [one.gradient(k) for one in found for k in (1, 3)]
    assert all(map(torch.equal, before, after)) and all(one.gradient(2) is None for one in found if one.is_vector)


# Sound models.


class Logged(Around):
    """A log of the data, and metrics, that the model does not read, or reads only to print and to check them."""

    def made(self):
        self.seen, self.most, self.count = [], 0.0, 0
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("positive", torch.zeros((), dtype=torch.int64))
        self.layer.register_forward_hook(lambda module, args, output: self.seen.append(output.mean().item()))

    def between(self, x):
        self.most, self.count = max(self.most, self.seen[-1]), self.count + int((x < 0).sum())
        self.total += x.detach().sum()
        self.positive += (x > 0).sum()
        self.text = f"{self.most:.3f}, {self.count}"
        if not all(map(math.isfinite, self.seen)):
            raise FloatingPointError("diverged")
        return x


class Passing(Around):
    """Values that are read in the pass that writes them, the number of passes, and a cache of positions."""

    def made(self):
        self.outputs, self.steps, self.cache = [], 0, {}
        self.rates = dict.fromkeys(self.parameters(), 0.1)

    def between(self, x):
        self.outputs.clear()
        self.outputs.append(x.square().mean())
        self.mean, self.steps, self.attention = x.mean(0), self.steps + 1, x.softmax(1)
        positions = self.cache.setdefault(x.shape[1], torch.arange(x.shape[1]))
        return (x - self.mean + self.outputs[0] + positions * self.attention) / self.steps


class Noise(Around):
    """Noise from private generators, with the same number of draws for each batch."""

    def made(self):
        self.numpy, self.python, self.torch = np.random.default_rng(0), random.Random(0), torch.Generator()

    def between(self, x):
        drawn = self.numpy.standard_normal() + self.python.random() + torch.rand((), generator=self.torch)
        return x * (1 + 0.1 * drawn)


class TiedLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(6, 6), nn.Linear(6, 6)
        self.out.weight = self.into.weight

    def forward(self, x):
        return self.out(self.into(x))


class First(nn.Module):
    def forward(self, outputs):
        return outputs[0]


class Elsewhere(Around):
    def made(self):
        frozen, scale = nn.Linear(6, 6).requires_grad_(False), torch.ones(6, requires_grad=True)
        self.layer.register_forward_hook(lambda module, given, output: frozen(output * scale))


SOUND = {
    **{each.__name__: each for each in (Logged, Passing, Noise, TiedLayers, Elsewhere)},
    "transformer": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), nn.Flatten(), nn.Linear(6, 3)
    ),
    "norms, dropout and psi": lambda: nn.Sequential(
        hyper.Averaged(
            hyper.InputMask(6), nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout()), samples=2
        ),
        nn.GroupNorm(2, 8), nn.LayerNorm(8), nn.PReLU(8), nn.Linear(8, 3),
    ),
    "LSTM": lambda: nn.Sequential(nn.LSTM(6, 4), First(), nn.Linear(4, 3)),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 3))),
}  # fmt: skip


def given_by(model, k, x):
    """Return subnetwork k's output in training, all gradients, and its output in evaluation."""
    torch.manual_seed(0)
    with partnets.subnetwork(model.train(), k, k):
        y = model(x)
        grads = torch.autograd.grad(
            y.square().sum(), [p for p in model.parameters() if p.requires_grad], allow_unused=True
        )
    with torch.no_grad(), partnets.subnetwork(model.eval(), k):
        return [y.detach(), *(grad for grad in grads if grad is not None), model(x)]


@pytest.mark.parametrize("options", [{}, {"scheme": "node"}, {"defaults": "stored"}], ids=str)
@pytest.mark.parametrize("proportions", [(0.8, 0.2), PROPORTIONS, (0.2,) * 5], ids=len)
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_model_has_no_leak(name, proportions, options):
    torch.manual_seed(0)
    model = partnets.partition(SOUND[name](), proportions, **options)
    before = Snapshot(model)
    assert partnets.audit(model, batch(), F.cross_entropy) == []
    assert not before.changed(Snapshot(model))
    clean = given_by(model, 2 if len(proportions) > 2 else 1, batch()[0])
    before.put_back()
    spoil(model, 2 if len(proportions) > 2 else 1)
    poisoned = given_by(model, 2 if len(proportions) > 2 else 1, batch()[0])
    assert name == "Noise" or (len(clean) == len(poisoned) and all(map(torch.equal, clean, poisoned)))


class Unsteady(Around):
    """A model with varying last bits, as from atomic additions on a GPU."""

    turn = itertools.count()

    def between(self, x):
        return x * (1 + 1e-6 * next(Unsteady.turn))


def test_results_that_vary_in_their_last_bits_are_no_leak(monkeypatch):
    monkeypatch.setattr(auditing, "STEADY", ())
    assert partnets.audit(model_of(Unsteady), batch(), F.cross_entropy) == []
    (leak,) = partnets.audit(model_of(RunningMean), batch(), F.cross_entropy)
    assert leak.path == "mean"


# Losses, penalties, batches.


class Smoothed(nn.Module):
    mean = 0.0

    def forward(self, output, y):
        loss = F.cross_entropy(output, y)
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        return loss / (1 + self.mean)


def test_losses_are_audited_too():
    model = model_of(Around)

    def penalised(values):
        return lambda output, y: F.cross_entropy(output, y) + 0.1 * sum(value.square().sum() for value in values())

    assert partnets.audit(model, batch(), penalised(model.parameters)) == []
    (leak,) = partnets.audit(model, batch(), penalised(lambda: [model.layer.bias_rows]))
    assert leak.what == f"computes loss {INACTIVE}"
    (leak, *_) = partnets.audit(model, batch(), Smoothed())
    assert "each time" in leak.what


class AllBiases(hyper.Penalty):
    """A penalty that multiplies active weights by the biases of all partitions."""

    def __init__(self, layer):
        super().__init__()
        self.of = [layer]

    def penalty(self, x):
        (layer,) = self.of
        return layer.weight.sum() * layer.bias_rows.sum()


@pytest.mark.full
def test_penalties_are_audited_too():
    for penalty, expected in ((hyper.WeightDecay, []), (AllBiases, [f"computes loss {INACTIVE}"])):
        model = Around()
        model.head = nn.Sequential(penalty(model.layer), model.head)
        found = partnets.audit(partnets.partition(model, PROPORTIONS), batch(), F.cross_entropy)
        assert [leak.what for leak in found] == expected


def test_a_batch_may_be_anything_that_forward_takes():
    model, (x, y) = model_of(RunningMean), batch()
    for given, options in (
        ({"x": x, "labels": y}, {}),
        ([{"deep": (x,)}], {"forward": lambda model, given: (model(given[0]["deep"][0]), None)}),
        ((x, None), {"other": (x + 1, None)}),
    ):
        (leak,) = partnets.audit(model, given, **options)
        assert leak.path == "mean"


class Detector(nn.Module):
    """A model that returns losses in training mode and detections in evaluation mode, as torchvision's detectors."""

    def __init__(self, leaks):
        super().__init__()
        self.layer, self.leaks, self.mean = nn.Linear(4, 5), leaks, 0.0

    def forward(self, x, targets=None):
        if self.leaks:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        y = self.layer(x - self.mean)
        if not self.training:
            return [{"scores": row[:3].softmax(0), "boxes": row[3:]} for row in y]
        return {"classes": F.cross_entropy(y[:, :3], targets[0]), "boxes": F.mse_loss(y[:, 3:], targets[1])}


@pytest.mark.parametrize("leaks", [False, True])
def test_models_that_return_losses_in_training_mode_only_are_audited(leaks):
    def forward(model, batch):
        return model(batch[0], batch[1]), batch[1]

    def summed(output, y):
        return sum(output.values())

    data = [(torch.randn(4), (torch.tensor(i % 3), torch.randn(2))) for i in range(30)]
    given, model = torch.utils.data.default_collate(data[:8]), partnets.partition(Detector(leaks), PROPORTIONS)
    found = [leak.path for leak in partnets.audit(model, given, summed, forward=forward)]
    assert found == (["mean"] if leaks else [])
    if not leaks:
        chunks = partnets.chunk(data, PROPORTIONS)
        partnets.Trainer(model, chunks, batch_size=8, loss=summed, forward=forward).fit(2)


def test_left_out_norms_are_held_still_as_trainers_do():
    model = partnets.partition(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), (0.5, 0.5), skip="1")
    assert partnets.audit(model, batch()) == []


# Refusals before any pass.


def test_two_parameters_in_one_memory_are_named():
    model = model_of(Around)
    model.layer._parameters["weight"].data = torch.randn(40)[:36].view(6, 6)
    assert partnets.audit(model, batch()) == []
    model.head._parameters["weight"].data = model.layer._parameters["weight"].data[:3]
    (leak, *_) = partnets.audit(model, batch())
    assert (leak.path, leak.what) == ("layer.weight", "shares memory with head.weight")


def test_the_model_must_have_partitions():
    with pytest.raises(ValueError, match="has no partitions"):
        partnets.audit(nn.Linear(6, 3), batch())


class LaterChannels(nn.Module):
    """A mean of the channels that subnetwork 1 of nested partitions lacks."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 20), nn.Linear(20, 3)
        self.register_buffer("mean", torch.zeros(20))

    def forward(self, x):
        h = self.first(x)
        own = self.mean[12 : h.shape[1]]
        own.lerp_(h.detach().mean(0)[12:], 0.5)
        return self.last(torch.cat([h[:, :12], h[:, 12:] - own], 1))


def test_state_of_channels_that_subnetwork_1_lacks_is_found():
    groups = [{"outputs": ["first"], "inputs": ["last"]}]
    model = partnets.partition(
        LaterChannels(), (0.6, 0.2, 0.2), scheme="nested", example=torch.randn(4, 6), channels=groups
    )
    assert any(leak.path == "mean" for leak in partnets.audit(model, batch(), F.cross_entropy))
