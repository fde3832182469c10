"""Buffers and frozen parameters of stateful modules are per subnetwork; compared with one dense module for each."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import partnets
from partnets.evaluation.auditing import leaks
from partnets.evaluation.snapshot import Snapshot
from partnets.subnetworks.state import partitioned_modules

PROPORTIONS = (0.5, 0.3, 0.2)


class Assigned(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class InPlace(Assigned):
    """It follows batches in evaluation mode too."""

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


class Codebook(nn.Module):
    """A codebook as in a VQ-VAE: codes without gradients, integer counts, and a temperature set from outside."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), requires_grad=False)
        self.register_buffer("uses", torch.zeros(5, dtype=torch.int64), persistent=False)
        self.temperature = 1.0

    def forward(self, x):
        nearest = torch.cdist(x, self.codes).argmin(1)
        if self.training:
            self.uses += nearest.bincount(minlength=5)
            self.codes.data.index_add_(0, nearest, 0.1 * (x.detach() - self.codes[nearest]))
        return x + self.temperature * (self.codes[nearest] - x).detach()


class Teacher(nn.Module):
    """Frozen modules that keep an average of a trainable layer's outputs."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)

    def forward(self, x):
        if self.training:
            self.teacher[0].bias.lerp_(x.detach().mean(0), 0.1)
            self.teacher[1].weight.mul_(0.9)
        return x + self.teacher(x)


class Both(nn.Module):
    """A trainable module with parameters, a layer and state, which contains another module with state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight_mean", torch.zeros(4))
        self.weight, self.factor = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.eye(4))
        self.layer, self.inner = nn.Linear(4, 4), nn.Sequential(InPlace(), nn.Linear(4, 4))

    def forward(self, x):
        if self.training:
            self.weight_mean.lerp_(x.detach().mean(0), 0.1)
        return self.inner(self.layer(x) - self.weight_mean + self.weight) @ self.factor


class Ends(nn.Module):
    """Two trainable modules that share a module with state."""

    def __init__(self):
        super().__init__()
        codes = InPlace()
        self.first, self.last = nn.Sequential(nn.Linear(4, 4), codes), nn.Sequential(nn.Linear(4, 4), codes)

    def forward(self, x):
        return self.last(self.first(x))


KEEPERS = [Assigned, InPlace, Codebook, Teacher, Both, Ends]
each = pytest.mark.parametrize("kind", KEEPERS, ids=lambda kind: kind.__name__)
pytestmark = pytest.mark.filterwarnings("ignore:the running statistics of 1 BatchNorm")  # which no test estimates


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def dense(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 2))


def network(kind, stateful=("1",)):
    return partnets.partition(dense(kind), PROPORTIONS, stateful=stateful, defaults="zero")


def batches(count=9):
    generator = torch.Generator().manual_seed(1)
    return [(n % 3 + 1, torch.randn(6, 4, generator=generator)) for n in range(count)]


def train(model):
    for k, x in batches():
        with partnets.subnetwork(model, k, k), torch.no_grad():
            model(x)
    return model


@each
def test_each_subnetwork_gives_the_outputs_of_its_dense_module(kind):
    model = network(kind)
    expected = {k: partnets.merge(model, k) for k in (1, 2, 3)}
    for k, x in batches():
        with partnets.subnetwork(model, k, k):
            y = model(x)
            y.sum().backward()
        theirs = expected[k](x)
        theirs.sum().backward()
        close(y, theirs)
        copied = copy.deepcopy(expected[k])
        with partnets.subnetwork(model, k), torch.no_grad():  # continues from there and leaves nothing
            for noise in torch.randn(2, 6, 4):
                close(model(noise), copied(noise))
    for k, one in expected.items():
        x = torch.randn(6, 4)
        close(partnets.merge(model, k).eval()(x), copy.deepcopy(one).eval()(x))
        with partnets.subnetwork(model.eval(), k):
            close(model(x), one.eval()(x))
        model.train()


@each
def test_merging_and_finalizing_give_the_dense_module_of_a_subnetwork(kind):
    model, start, x = train(network(kind)), dense(kind)[1], torch.randn(6, 4)
    for k in (1, 2, 3):
        merged = partnets.merge(model, k)
        assert type(merged[1]) is type(start) and list(merged[1].state_dict()) == list(start.state_dict())
    close(partnets.finalize(model, "deploy")(x), merged.eval()(x))
    if kind not in (Both, Ends):  # whose parameters are drawn again
        fresh = partnets.finalize(model, "retrain")[1]
        for (name, ours), (_, theirs) in zip(fresh.state_dict().items(), start.state_dict().items(), strict=True):
            assert torch.equal(ours, theirs), name
        assert torch.equal(fresh(x), start(x))


@each
def test_copies_pickles_and_state_dicts_keep_all_buffers(kind):
    model = train(network(kind))
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), network(kind)]
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    others[-1].load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    for other in others:
        for k in (1, 2, 3):
            x = torch.randn(6, 4)
            with partnets.subnetwork(model.eval(), k), partnets.subnetwork(other.eval(), k):
                assert torch.equal(other(x), model(x))


@each
def test_each_example_reads_and_updates_the_buffers_of_its_subnetwork(kind):
    model, other, x = network(kind), network(kind), torch.randn(12, 4)
    ks = torch.tensor([1, 2, 3]).repeat_interleave(4)
    for update in (None, ks, None):
        with partnets.subnetwork(model, ks, update), torch.no_grad():
            y = model(x)
        for k in (1, 2, 3):
            with partnets.subnetwork(other, k, None if update is None else k), torch.no_grad():
                close(y[ks == k], other(x[ks == k]))


@each
def test_an_audit_finds_leaks_only_without_stateful_and_changes_nothing(kind):
    model = network(kind)
    before = Snapshot(model)
    assert partnets.audit(model, (torch.randn(8, 4), None)) == [] and not before.changed(Snapshot(model))
    assert partnets.audit(network(kind, ()), (torch.randn(8, 4), None))


def test_outside_subnetworks_buffers_are_those_of_subnetwork_c():
    model = network(Codebook)
    model(torch.randn(6, 4))
    assert model[1].uses.sum() == 6
    for k, uses in ((1, 0), (2, 0), (3, 6)):
        with partnets.subnetwork(model, k):
            assert model[1].uses.sum() == uses
    assert model.double()[1].codes.dtype == model[1].codes_rows.dtype == torch.float64


def test_subnetworks_without_an_update_restore_buffer_objects():
    model = network(Assigned)
    before = model[1].mean
    with partnets.subnetwork(model, 3):
        model(torch.randn(6, 4))
        assert model[1].mean is not before
    assert model[1].mean is before and not before.any()


@pytest.mark.parametrize("make", [Assigned, lambda: nn.BatchNorm1d(4)])
def test_statistics_of_a_last_subnetwork_that_is_not_c_are_no_leak(make):
    model = network(make)

    def compute(x):
        return model(x), model(x).square().mean()

    assert leaks(model, compute, torch.randn(8, 4), torch.randn(8, 4), last=2) == []


class Growing(Assigned):
    def forward(self, x):
        self.mean = torch.cat([self.mean, x.detach().mean(0)])
        return x - self.mean.sum()


class Counting(Assigned):
    def forward(self, x):
        self.mean = self.mean.long() + 1
        return x - self.mean


class Removing(Assigned):
    def forward(self, x):
        y, self.mean = x - self.mean, None
        return y


@pytest.mark.parametrize(
    ("kind", "is_inside"), [(Growing, False), (Growing, True), (Counting, False), (Counting, True), (Removing, True)]
)
def test_buffers_that_change_shape_or_dtype_or_are_removed_are_refused_and_restored(kind, is_inside):
    model = network(kind)
    if not is_inside:
        model(torch.randn(6, 4))
    with (
        pytest.raises(RuntimeError, match=f"mean of {kind.__name__} has changed its .* or was removed"),
        partnets.subnetwork(model, 2, 2),
    ):
        model(torch.randn(6, 4))
    if kind is not Removing:
        each = torch.tensor([1, 2])
        with pytest.raises(RuntimeError, match="mean has changed its"), partnets.subnetwork(model, each, each):
            model(torch.randn(2, 4))
    for k in (1, 2, 3):
        with partnets.subnetwork(model, k, k):
            assert torch.equal(model[1].mean, torch.zeros(4))


class Largest(Assigned):
    """Two buffers that the code makes one tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("best", torch.zeros(4))

    def forward(self, x):
        self.mean = x.detach().mean(0)
        if self.mean.norm() > self.best.norm():
            self.best = self.mean
        return x - self.mean - self.best


def test_buffers_assigned_one_tensor_stay_separate_in_each_subnetwork():
    model, x = network(Largest), torch.randn(6, 4)
    with partnets.subnetwork(model, 1, 1):
        model(x)
        model(x / 2)  # the mean changes, the best one stays
        expected = model[1].mean.clone(), model[1].best.clone()
    with partnets.subnetwork(model, 3, 3):
        model(5 * x)
    assert model[1].mean is not model[1].best
    with partnets.subnetwork(model, 1, 1):
        assert torch.equal(model[1].mean, expected[0]) and torch.equal(model[1].best, expected[1])
    assert not torch.equal(*expected) and not torch.equal(model[1].best, expected[1])


def with_buffer(name, of):
    """Return a function that makes an Assigned with a second buffer, computed from its mean."""

    def make():
        module = Assigned()
        module.register_buffer(name, of(module.mean))
        return module

    return make


def with_tensor():
    module = Assigned()
    module.first = module.mean[:1]
    return module


def norm():
    """Return a layer with running statistics, and no rule for them."""
    module = nn.Linear(4, 4)
    module.register_buffer("running_mean", torch.zeros(4))
    return module


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.jit.script(nn.BatchNorm1d(4, affine=False))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(("stateful", "module", "message"), [
    (["1"], with_buffer("mean_rows", torch.sum), "Assigned .*with an attribute mean_rows"),
    (["1"], with_tensor, "Assigned .*with a tensor in an attribute first"),
    (["1"], with_buffer("first", lambda mean: mean[:1]), "1.mean and 1.first share memory"),
    (["1"], nn.ReLU, "have no buffers or frozen parameters"),
    (["1"], Scripted, "compiled code"),
    (["nowhere"], Assigned, "stateful names 'nowhere'"),
    ([], norm, "name it in stateful=, or register a rule"),
])  # fmt: skip
def test_buffers_that_cannot_be_separated_are_refused(stateful, module, message):
    model = nn.Sequential(nn.Linear(4, 4), module())
    before = list(model.state_dict())
    with pytest.raises(ValueError, match=message):
        partnets.partition(model, PROPORTIONS, stateful=stateful)
    assert before == list(model.state_dict()) and not partitioned_modules(model)


def test_one_partition_keeps_the_keys_of_the_dense_state_dict():
    model = partnets.partition(nn.Sequential(nn.Linear(4, 4), Codebook()), (1.0,), stateful="1")
    model(torch.randn(6, 4))
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.codes"]
