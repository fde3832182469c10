"""An audit finds and names leaks of later chunks into earlier subnetworks, and changes nothing."""

import contextvars
import itertools
import math
import random
import threading
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from layers import dense, perturbed
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import partnets
from partnets import hyper
from partnets.evaluation import auditing
from partnets.evaluation.snapshot import Snapshot
from partnets.subnetworks.parameters import partitioned_parameters

PROPORTIONS = (0.5, 0.3, 0.2)


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


class Parameters(Around):
    def between(self, x):
        return x + 1e-3 * sum(parameter.square().sum() for parameter in self.layer.parameters())


class Entries(Around):
    def between(self, x):
        return F.linear(x, self.layer._parameters["weight"])


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(factor.clone())
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].sum(), None


class Gradient(Around):
    def between(self, x):
        return Twice.apply(x, dict(self.layer.named_parameters())["weight"])


class InEvaluation(Around):
    def between(self, x):
        return x if self.training else x * self.layer._parameters["weight"].norm()


class Bound(Around):
    """A method of a layer that is kept."""

    def made(self):
        self.call = self.layer.forward

    def between(self, x):
        return self.call(x)


class Rows(Around):
    """A buffer in which partnets.partition stores the biases of all partitions."""

    def between(self, x):
        return x + 1e-3 * self.layer.bias_rows.sum()


class RowsOfGradient(Around):
    def between(self, x):
        return Twice.apply(x, self.layer.bias_rows)


class RowsInEvaluation(Around):
    def between(self, x):
        return x if self.training else x * self.layer.bias_rows.norm()


class RunningMean(Around):
    def made(self):
        self.register_buffer("mean", torch.zeros(6))

    def between(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Codebook(Around):
    def made(self):
        self.register_buffer("codes", torch.randn(4, 6))

    def between(self, x):
        nearest = torch.cdist(x, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                self.codes.index_add_(0, nearest, 0.1 * (x - self.codes[nearest]))
        return x + (self.codes[nearest] - x).detach()


class Experts(Around):
    """A mixture of experts, balanced by integer counts of their load."""

    def made(self):
        self.register_buffer("load", torch.zeros(6, dtype=torch.int64))

    def between(self, x):
        chosen = (x - 0.01 * self.load).argmax(1)
        self.load += chosen.bincount(minlength=6)
        return x * F.one_hot(chosen, 6)


class Number(Around):
    scale = 1.0

    def between(self, x):
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * x.std().item()
        return x / self.scale


class Nested(Around):
    def made(self):
        self.kept = {"means": [torch.zeros(6)]}

    def between(self, x):
        self.kept["means"][0] = 0.9 * self.kept["means"][0] + 0.1 * x.detach().mean(0)
        return x - self.kept["means"][0]


class Logged(Around):
    """A log of the data, and metrics, that the model does not read."""

    def made(self):
        self.seen, self.most, self.count = [], 0.0, 0
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("positive", torch.zeros((), dtype=torch.int64))

    def between(self, x):
        self.seen.append(x.mean().item())
        self.most, self.count = max(self.most, self.seen[-1]), self.count + int((x < 0).sum())
        self.total += x.detach().sum()
        self.positive += (x > 0).sum()
        return x


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


class Hooked(Around):
    def made(self):
        mean = torch.zeros(6)

        def center(module, args, output):
            mean.lerp_(output.detach().mean(0), 0.1)
            return output - mean

        self.layer.register_forward_hook(center)


class Random(Around):
    def made(self):
        self.noise = nn.RReLU()

    def between(self, x):
        return self.noise(x)


class PythonRandom(Around):
    def between(self, x):
        return x * sum(random.random() for _ in range(int(x.abs().sum())))


class OutOfSight(Around):
    """A running mean in a class attribute, which belongs to no module instance."""

    mean = 0.0

    def between(self, x):
        if self.training:
            type(self).mean = 0.9 * type(self).mean + 0.1 * x.detach().mean(0)
        return x - type(self).mean


class MadeInForward(Around):
    def made(self):
        self.teacher = None

    def between(self, x):
        if self.teacher is None:
            self.teacher = nn.Linear(6, 6).requires_grad_(False)
        with torch.no_grad():
            self.teacher.weight.lerp_(x.mean(0).expand(6, 6), 0.5)
        return x + self.teacher(x)


class Noise(Around):
    """Noise from private generators, with the same number of draws for each batch."""

    def made(self):
        self.numpy, self.python = np.random.default_rng(0), random.Random(0)

    def between(self, x):
        return x * (1 + 0.1 * self.numpy.standard_normal() + 0.1 * self.python.random())


class Overwritten(Around):
    """State without a leak: the last pass's attention, and counts of passes."""

    def made(self):
        self.attention, self.steps, self.cache = None, 0, {}
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def between(self, x):
        self.attention, self.steps = x.softmax(1), self.steps + 1
        self.passes += 1
        positions = self.cache.setdefault(x.shape[1], torch.arange(x.shape[1]))
        return x * self.attention + positions


def model_of(around, **options):
    torch.manual_seed(0)
    return partnets.partition(around(), PROPORTIONS, **options)


def batch(count=12):
    torch.manual_seed(1)
    return torch.randn(count, 6), torch.arange(count) % 3


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


class Observer(Around):
    """The largest range of all passes, as in calibration for quantisation; often an earlier subnetwork has it."""

    def made(self):
        self.register_buffer("attention", torch.zeros(()))  # overwritten in each pass
        self.register_buffer("range", torch.zeros(()))

    def between(self, x):
        self.attention = x.detach().softmax(1)
        self.range = torch.maximum(self.range, x.detach().abs().amax())
        return x / self.range


class Loud(Around):
    """A running maximum as a Python number."""

    most = 0.0

    def between(self, x):
        self.most = max(self.most, x.abs().amax().item())
        return x / self.most


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


LAST = {"mean": 0.0}


class LastOfAll(Around):
    """A mean in a global variable, written when gradients are enabled."""

    def between(self, x):
        if torch.is_grad_enabled():
            LAST["mean"] = x.detach().mean(0)
            return x
        return x - LAST["mean"]


class LastWeight(Around):
    """A copy of the last training pass's weight, used in evaluation."""

    kept = None

    def between(self, x):
        if self.training:
            self.kept = self.layer.weight.detach().clone()
        return x if self.kept is None else F.linear(x, self.kept)


class Hebbian(Around):
    """An update of all entries of a weight through named_parameters(), not through the attribute."""

    def between(self, x):
        if self.training:
            with torch.no_grad():
                dict(self.layer.named_parameters())["weight"].data.add_(1e-3 * x.T @ x / len(x))
        return x


class FirstBatch(Around):
    """A parameter that the first training batch initialises."""

    def made(self):
        self.shift = nn.Parameter(torch.zeros(6))
        self.register_buffer("is_set", torch.tensor(False))

    def between(self, x):
        if self.training and not self.is_set:
            with torch.no_grad():
                dict(self.named_parameters())["shift"].copy_(-x.mean(0))
            self.is_set.fill_(True)
        return x + self.shift


class Backwards(Around):
    """A bias that the backward pass modifies."""

    def between(self, x):
        def decay(grad):
            self.layer._parameters["bias"].data.add_(grad.sum(0), alpha=-0.01)

        if x.requires_grad:
            x.register_hook(decay)
        return x


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


class Distilled(Around):
    """An average with the outputs of another subnetwork."""

    is_inside = False

    def forward(self, x):
        y = super().forward(x)
        if self.training or self.is_inside:
            return y
        self.is_inside = True
        with partnets.subnetwork(self, 3):
            y = y + self(x)
        self.is_inside = False
        return y


LEAKS = {
    MergedAdapter: "the model itself computes output 0 in evaluation from weights of inactive partitions",
    Distilled: "the model itself computes output 0 in evaluation from weights of inactive partitions",
    Rows: "the model itself computes output 0 from weights of inactive partitions",
    RowsOfGradient: "the model itself computes gradient of layer.weight from weights of inactive partitions",
    RowsInEvaluation: "the model itself computes output 0 in evaluation from weights of inactive partitions",
    RunningMean: "mean follows the data",
    Codebook: "codes follows the data",
    Experts: "load follows the data",
    Number: "scale follows the data",
    Nested: "kept.means.0 follows the data",
    Teacher: "teacher.0.weight follows the data",
    Frozen: "center follows the data",
    Hooked: "layer._forward_hooks.",
    Random: "noise draws random numbers, and how many depends on the data",
    PythonRandom: "the model itself draws random numbers",
    OutOfSight: "OutOfSight.mean follows the data",
    MadeInForward: "teacher",
    MadeForEvaluation: "kept follows the data",
    Stateful: "hidden follows the data",
    LastBatch: "mean follows the data",
    LastEvaluation: "layer._forward_hooks.",
    LastOfAll: "the model itself computes another output 0 in evaluation after later chunks were seen",
    LastWeight: "kept follows the data",
    Observer: "range follows the data",
    Loud: "most follows the data",
    Loudest: "layer._forward_hooks.",
    Hebbian: "layer.weight is changed in a pass",
}


@pytest.mark.parametrize("around", LEAKS, ids=lambda around: around.__name__)
def test_a_leak_is_found_and_named_and_the_model_stays_as_it_was(around):
    model, given = model_of(around), batch()
    model(given[0]).sum().backward()
    model.eval()(given[0])
    before, drawn = Snapshot(model.train()), torch.get_rng_state()
    found = partnets.audit(model, given, F.cross_entropy)
    assert any(str(leak).startswith(LEAKS[around]) for leak in found), found
    assert all("; " in str(leak) for leak in found)
    assert not before.changed(Snapshot(model)) and torch.equal(torch.get_rng_state(), drawn)
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


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


@pytest.mark.parametrize("around", [Observer, Loud, Loudest])
def test_a_maximum_that_subnetwork_1_exceeds_itself_in_the_trial_is_found(around):
    model = model_of(around)
    partition = partnets.partitions(model)["layer.weight"]
    with torch.no_grad():
        model.layer.weight[partition.mask(2) | partition.mask(3)] *= 0.01
    (leak,) = partnets.audit(model, batch(), F.cross_entropy)
    assert str(leak).startswith(LEAKS[around]) and "follows the data" in str(leak)


READERS = [Parameters, Entries, Gradient, InEvaluation, Bound]


@pytest.mark.parametrize("around", READERS, ids=lambda around: around.__name__)
def test_parameters_are_those_of_the_active_subnetwork_however_they_are_read(around):
    model, (x, y) = perturbed(model_of(around), 0.25), batch()
    assert partnets.audit(model, (x, y), F.cross_entropy) == []
    for k in (1, 2, 3):
        twin = dense(model, k)
        with partnets.subnetwork(model, k):
            for mode in (True, False):
                torch.testing.assert_close(model.train(mode)(x), twin.train(mode)(x))
        with partnets.subnetwork(model.train(), k, k):
            (grad,) = torch.autograd.grad(F.cross_entropy(model(x), y), model.layer.weight)
        (expected,) = torch.autograd.grad(F.cross_entropy(twin.train()(x), y), twin.layer.weight)
        mask = partnets.partitions(model)["layer.weight"].mask(k)
        torch.testing.assert_close(grad, torch.where(mask, expected, 0))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_what_a_hook_of_a_gradient_remembers_is_found_and_stays_as_it_was(kind):
    model, largest = model_of(Around), [0.0]

    def clip(given):
        grad = given if kind == "register_hook" else given.grad
        largest[0] = max(largest[0], grad.norm().item())
        grad.mul_(largest[0])

    getattr(model.layer.weight, kind)(clip)
    found = partnets.audit(model, batch(), F.cross_entropy)
    assert any("layer.weight._" in leak.path and leak.what.startswith("follows the data") for leak in found), found
    assert largest == [0.0]


def test_what_is_kept_by_parameters_as_keys_is_no_leak():
    model = model_of(Around)
    model.rates, model.seen = dict.fromkeys(model.parameters(), 0.1), {*model.parameters()}
    names = {p: name for name, p in model.named_parameters()}
    model.layer.weight.register_hook(lambda grad: grad if names else None)
    assert partnets.audit(model, batch(), F.cross_entropy) == []


@pytest.mark.parametrize(
    "around", [RunningMean, Codebook, Experts, Frozen, LastBatch], ids=lambda around: around.__name__
)
def test_what_is_kept_for_each_subnetwork_is_no_leak(around):
    model = model_of(around, stateful=[""])
    before = Snapshot(model)
    assert partnets.audit(model, batch(), F.cross_entropy) == []
    assert not before.changed(Snapshot(model))


class Keeping(Around):
    """A module that keeps its mean in some place until the next call, and subtracts the one before or does not."""

    place, is_read = None, True

    def made(self):
        self.frozen, self.array = nn.Parameter(torch.zeros(6), requires_grad=False), np.zeros(6, np.float32)
        self.momentum = [torch.zeros(6, requires_grad=True)]
        self.optimizer, self.seen = torch.optim.SGD(self.momentum, 0.1, momentum=0.9), [0.0]

    def between(self, x):
        before = type(self).place(self, x.detach().mean(0))
        return x - before if self.is_read else x


def swapped(container, value, first=0.0):
    """Store a value in a dict, and return the value before."""
    before = container.get("kept", first)
    container["kept"] = value
    return before


def in_default(module, value, kept={}):  # noqa: B006
    return swapped(kept, value)


def in_gradient(module, value):
    before, module.frozen.grad = module.frozen.grad, value
    return 0.0 if before is None else before


def in_context(module, value):
    before = CONTEXT.get()
    CONTEXT.set(value)
    return before


def in_generator(module, value):
    def last():
        before, now = 0.0, (yield)
        while True:
            before, now = now, (yield before)

    if module not in WEAK:
        next(WEAK.setdefault(module, last()))
    return WEAK[module].send(value)


def in_momentum(module, value):
    (one,) = module.momentum
    one.data.zero_()
    one.grad = value
    module.optimizer.step()
    return one.detach().clone()


def in_numpy(module, value):
    before = torch.from_numpy(module.array).clone()
    module.array[:] = value.numpy()
    return before


def in_thread(module, value):
    thread = threading.Thread(target=module.seen.append, args=[value])
    thread.start()
    thread.join()
    return module.seen[-2]


CONTEXT, LOCAL, GLOBAL, WEAK = contextvars.ContextVar("kept", default=0.0), threading.local(), {}, WeakKeyDictionary()
PLACES = {
    "another module": lambda module, value: swapped(vars(module.head), value),
    "a parameter's attribute": lambda module, value: swapped(vars(module.layer.weight), value),
    "a list": lambda module, value: swapped(vars(module.head), [value], [0.0])[0],
    "a tuple": lambda module, value: swapped(vars(module), (value,), (0.0,))[0],
    "text": lambda module, value: float(swapped(vars(module), str(value.sum().item()), "0")),
    "a sparse tensor": lambda module, value: swapped(vars(module), value.to_sparse(), DENSE.to_sparse()).to_dense(),
    "complex numbers": lambda module, value: swapped(vars(module), value + 1j, DENSE).real,
    "a set": lambda module, value: sum(swapped(vars(module), {value[0].item()}, {0.0})),
    "a function": lambda module, value: swapped(vars(module), lambda: value, lambda: 0.0)(),
    "a weak dict": lambda module, value: swapped(WEAK.setdefault(module.layer, {}), value),
    "a thread-local": lambda module, value: swapped(vars(LOCAL), value),
    "a global": lambda module, value: swapped(GLOBAL, value),
    "a default": in_default,
    "a gradient": in_gradient,
    "a context variable": in_context,
    "a generator": in_generator,
    "momentum": in_momentum,
    "memory of numpy": in_numpy,
    "what a thread writes": in_thread,
}
DENSE = torch.zeros(6)


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_kept_anywhere_is_a_leak_if_it_is_read(place, is_read):
    around = type("Keeping", (Keeping,), {"place": staticmethod(PLACES[place]), "is_read": is_read})
    assert bool(partnets.audit(model_of(around), batch(), F.cross_entropy)) == is_read


class Guarded(Around):
    """Logs that the model reads only to print and to check them, which fails for NaN."""

    def made(self):
        self.log, self.mean = [], 0.0

    def between(self, x):
        self.log.append(x.mean().item())
        self.mean = 0.9 * self.mean + 0.1 * self.log[-1]
        self.text = f"{self.mean:.3f}, {round(self.mean)}"
        if not all(map(math.isfinite, self.log)):
            raise FloatingPointError("diverged")
        return x


class Passing(Around):
    """Values that are read in the pass that writes them, and the number of passes."""

    steps = 0

    def made(self):
        self.outputs = []

    def between(self, x):
        self.outputs.clear()
        self.outputs.append(x.square().mean())
        self.mean, self.steps = x.mean(0), self.steps + 1
        return (x - self.mean + self.outputs[0]) / self.steps


class Tied(Around):
    def between(self, x):
        def compute(x):
            return F.linear(x, self.layer.weight.t() / self.layer.weight.norm())

        return checkpoint(compute, x, use_reentrant=False)


def sequence():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, 6)), layer, nn.Flatten(), nn.Linear(6, 3))


def normed():
    noisy = hyper.Averaged(
        hyper.InputMask(6), nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout()), samples=2
    )
    return nn.Sequential(noisy, nn.ReLU(), nn.PReLU(8), nn.Linear(8, 3))


class TiedLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(6, 6), nn.Linear(6, 6)
        self.out.weight = self.into.weight

    def forward(self, x):
        return self.out(self.into(x))


SOUND = {
    "tied layers": TiedLayers,
    "overwritten": Overwritten,
    "written and never read": Logged,
    "written and checked": Guarded,
    "written before it is read": Passing,
    "noise": Noise,
    "tied by reading": Tied,
    "transformer": sequence,
    "BatchNorm, dropout and psi": normed,
    "LSTM": lambda: nn.Sequential(nn.LSTM(6, 4), _First(), nn.Linear(4, 3)),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 3))),
}


class _First(nn.Module):
    def forward(self, outputs):
        return outputs[0]


@pytest.mark.parametrize("options", [{}, {"scheme": "node"}, {"defaults": "stored"}], ids=str)
@pytest.mark.parametrize("proportions", [(1.0,), (0.8, 0.2), PROPORTIONS, (0.2,) * 5], ids=len)
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_model_has_no_leak(name, proportions, options):
    torch.manual_seed(0)
    model = partnets.partition(SOUND[name](), proportions, **options)
    before = Snapshot(model)
    assert partnets.audit(model, batch(), F.cross_entropy) == []
    assert not before.changed(Snapshot(model))


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("scheme", ["weight", "nested"])
def test_weights_that_are_tied_after_they_were_divided_apart_leak_nothing(scheme):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    options = {"example": torch.randn(2, 6)} if scheme == "nested" else {}
    partnets.partition(model, PROPORTIONS, scheme=scheme, **options)
    model[2].weight = model[0].weight
    assert partnets.audit(model, batch(), F.cross_entropy) == []


class Reentrant(Around):
    def between(self, x):
        return checkpoint(lambda x: x.tanh(), x, use_reentrant=True)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_are_tried_as_well():
    assert partnets.audit(model_of(Reentrant), batch(), F.cross_entropy) == []


class Unsteady(Around):
    """A model with varying last bits, as from atomic additions on a GPU."""

    turn = itertools.count()

    def between(self, x):
        self.last = x.detach() * (1 + 1e-6 * next(Unsteady.turn))
        return x * (1 + 1e-6 * next(Unsteady.turn))


class UnsteadyLeak(Unsteady):
    def between(self, x):
        return super().between(x) + 1e-3 * self.layer.bias_rows.sum()


class UnsteadyMean(Unsteady, RunningMean):
    def between(self, x):
        return RunningMean.between(self, super().between(x))


@pytest.mark.full
def test_what_differs_by_itself_is_no_leak_and_hides_none(monkeypatch):
    monkeypatch.setattr(auditing, "STEADY", ())
    assert partnets.audit(model_of(Unsteady), batch(), F.cross_entropy) == []
    (leak,) = partnets.audit(model_of(UnsteadyLeak), batch(), F.cross_entropy)
    assert "from weights of inactive partitions" in leak.what
    (leak,) = partnets.audit(model_of(UnsteadyMean), batch(), F.cross_entropy)
    assert leak.path == "mean"


class Initialised(nn.Module):
    """A layer like ActNorm: its parent initialises its parameters with the first batch."""

    def __init__(self):
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(6))
        self.register_buffer("done", torch.tensor(False))

    def initialise(self, x):
        self.loc.data.copy_(-x.detach().mean(0))

    def forward(self, x):
        return x + self.loc


class Initialising(Around):
    def made(self):
        self.norm = Initialised()

    def between(self, x):
        if not self.norm.done:
            self.norm.initialise(x)
        return self.norm(x)


class Clamped(Around):
    def between(self, x):
        head = self.head
        with torch.no_grad():
            head.weight.clamp_(-0.01, 0.01)
        return x


WRITERS = {
    Initialising: "norm.loc", Clamped: "head.weight", FirstBatch: "shift", Hebbian: "layer.weight",
    Backwards: "layer.bias",
}  # fmt: skip


@pytest.mark.parametrize("around", WRITERS, ids=lambda around: around.__name__)
def test_writing_into_a_parameter_is_found_and_the_model_stays_as_it_was(around):
    model = perturbed(model_of(around), 0.25)
    before, twin = Snapshot(model), dense(model, 1)
    (leak,) = partnets.audit(model, batch(), F.cross_entropy)
    assert leak.path == WRITERS[around] and leak.what.startswith("is changed in a pass")
    assert not before.changed(Snapshot(model))
    with partnets.subnetwork(model, 1):  # its default values are as they were
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(one, other)


ELSEWHERE = nn.Linear(6, 6)


class Elsewhere(Around):
    def between(self, x):
        return ELSEWHERE(x)


def test_parameters_of_no_module_of_the_model_are_said_to_be_none_of_its_own():
    (leak,) = partnets.audit(model_of(Elsewhere), batch(), F.cross_entropy)
    assert (leak.path, leak.what) == ("", "computes with parameters of shape [6, 6], [6] that are not in the model")


def test_tensors_and_frozen_modules_from_elsewhere_are_no_leak():
    frozen, scale = nn.Linear(6, 6).requires_grad_(False), torch.ones(6, requires_grad=True)
    model = model_of(Around)
    model.layer.register_forward_hook(lambda module, given, output: frozen(output * scale))
    assert partnets.audit(model, batch(), F.cross_entropy) == []


def test_a_loss_that_reads_weights_of_all_partitions_is_a_leak():
    model = model_of(Around)

    def penalised(output, y):
        return F.cross_entropy(output, y) + 0.1 * sum(parameter.square().sum() for parameter in model.parameters())

    assert partnets.audit(model, batch(), penalised) == []

    def summed(output, y):
        return F.cross_entropy(output, y) + 0.1 * model.layer.bias_rows.square().sum()

    (leak,) = partnets.audit(model, batch(), summed)
    assert leak.what == "computes loss from weights of inactive partitions"


class Smoothed(nn.Module):
    mean = 0.0

    def forward(self, output, y):
        loss = F.cross_entropy(output, y)
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        return loss / (1 + self.mean)


def test_a_loss_that_remembers_is_a_leak():
    (leak, *_) = partnets.audit(model_of(Around), batch(), Smoothed())
    assert "each time" in leak.what


def test_left_out_norms_are_held_still_as_trainers_do():
    model = partnets.partition(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), (0.5, 0.5), skip="1")
    assert partnets.audit(model, batch()) == []


def test_a_batch_may_be_anything_that_forward_takes():
    model = model_of(Number)
    x, y = batch()
    for given, options in (
        ({"x": x, "labels": y}, {}),
        ([{"deep": (x,)}], {"forward": lambda model, given: (model(given[0]["deep"][0]), None)}),
        ((x, None), {"other": (x + 1, None)}),
    ):
        (leak,) = partnets.audit(model, given, **options)
        assert leak.path == "scale"


def test_two_parameters_on_one_memory_are_named():
    model = model_of(Around)
    model.layer._parameters["weight"].data = torch.randn(40)[:36].view(6, 6)
    assert partnets.audit(model, batch()) == []
    model.head._parameters["weight"].data = model.layer._parameters["weight"].data[:3]
    (leak, *_) = partnets.audit(model, batch())
    assert (leak.path, leak.what) == ("layer.weight", "shares memory with head.weight")


@pytest.mark.parametrize("of", [nn.utils.spectral_norm, parametrizations.spectral_norm])
@pytest.mark.parametrize("out", [1, 4])
def test_spectral_norms_are_refused_of_vectors_too(of, out):
    with pytest.raises(ValueError, match=r"power iteration|weight_orig|weight normalisation"):
        partnets.partition(nn.Sequential(of(nn.Linear(4, out))), PROPORTIONS)


def test_the_model_must_have_partitions():
    with pytest.raises(ValueError, match="has no partitions"):
        partnets.audit(nn.Linear(6, 3), batch())


class AllBiases(hyper.Penalty):
    """A penalty that multiplies active weights by the biases of all partitions."""

    def __init__(self, layer):
        super().__init__()
        self.of = [layer]

    def penalty(self, x):
        (layer,) = self.of
        return layer.weight.sum() * layer.bias_rows.sum()


@pytest.mark.full
def test_a_penalty_may_stand_before_what_it_is_of():
    network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    for first in (hyper.WeightDecay(network), hyper.LearningRate(network)):
        model = partnets.partition(nn.Sequential(first, network), PROPORTIONS)
        batch = torch.randn(8, 6), torch.randint(3, (8,))
        assert not partnets.audit(model, batch, F.cross_entropy)
        network = partnets.merge(model)[1]


@pytest.mark.full
def test_what_a_penalty_reads_is_looked_at():
    def leaks(penalty):
        model = Around()
        model.head = nn.Sequential(model.head, penalty(model.layer))
        batch = torch.randn(8, 6), torch.randint(3, (8,))
        return partnets.audit(partnets.partition(model, PROPORTIONS), batch, F.cross_entropy)

    assert not leaks(hyper.WeightDecay)
    (leak,) = leaks(AllBiases)
    assert leak.what == "computes loss from weights of inactive partitions"


class Detector(nn.Module):
    """A model that returns losses in training mode and detections in evaluation mode, as torchvision's detectors."""

    def __init__(self, leaks=False):
        super().__init__()
        self.layer, self.leaks, self.mean = nn.Linear(4, 5), leaks, 0.0

    def forward(self, x, targets=None):
        if self.leaks:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        y = self.layer(x - self.mean)
        if not self.training:
            return [{"scores": row[:3].softmax(0), "boxes": row[3:]} for row in y]
        return {"classes": F.cross_entropy(y[:, :3], targets[0]), "boxes": F.mse_loss(y[:, 3:], targets[1])}


def losses_of(output, y):
    return sum(output.values())


def test_models_that_return_losses_in_training_mode_only_are_audited():
    def forward(model, batch):
        return model(batch[0], batch[1]), batch[1]

    data = [(torch.randn(4), (torch.tensor(i % 3), torch.randn(2))) for i in range(30)]
    batch = torch.utils.data.default_collate(data[:8])
    for leaks, expected in ((False, []), (True, ["mean"])):
        model = partnets.partition(Detector(leaks), PROPORTIONS)
        assert [leak.path for leak in partnets.audit(model, batch, losses_of, forward=forward)] == expected
    model, chunks = partnets.partition(Detector(), PROPORTIONS), partnets.chunk(data, PROPORTIONS)
    partnets.Trainer(model, chunks, batch_size=8, loss=losses_of, forward=forward).fit(2)
    client = partnets.federated.Client(model, data, 1, loss=losses_of, forward=forward, batch_size=8)
    client.train(client.vectors.read(), 1)
