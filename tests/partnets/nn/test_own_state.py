"""State that a module keeps between calls is per subnetwork; compared with one dense module for each."""

import copy
import enum
import io
import pickle
import random
import threading
import types
import warnings
from collections import deque

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from partnets.nn.own_state import STATE_OF
from torch import nn

import partnets

PROPORTIONS = (0.5, 0.3, 0.2)
ALL = pytest.mark.parametrize


class Assigned(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class InPlace(Assigned):
    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


class Codebook(nn.Module):
    """A codebook as in a VQ-VAE: codes without gradients, integer counts, and a temperature set from outside."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), requires_grad=False)
        self.register_buffer("uses", torch.zeros(5, dtype=torch.int64), persistent=False)
        self.register_buffer("last", None, persistent=False)
        self.temperature = 1.0

    def nearest(self, x):
        return torch.cdist(x, self.codes).argmin(1)

    def forward(self, x):
        nearest = self.nearest(x)
        if self.training:
            self.last = nearest
            self.uses += nearest.bincount(minlength=5)
            self.codes.data.index_add_(0, nearest, 0.1 * (x.detach() - self.codes[nearest]))
        return x + self.temperature * (self.codes[nearest] - x).detach()


class Number(nn.Module):
    steps = 0
    scale = 1.0

    def forward(self, x):
        if self.training:
            self.steps += 1
            self.scale += x.std().item() / self.steps
        return x / self.scale


class Moments:
    def __init__(self):
        self.seen = [torch.zeros(4)]


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = {"moments": Moments(), "queue": deque([0.0], maxlen=3)}
        self.same = self.kept["queue"]

    def forward(self, x):
        if self.training:
            self.kept["moments"].seen.append(x.detach().mean(0))
            self.same.append(x.mean().item())
        return x + sum(self.kept["moments"].seen) + sum(self.kept["queue"])


class Teacher(nn.Module):
    """Frozen modules that keep an average of a trainable layer's outputs."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
        self.hidden = [nn.Linear(4, 4).requires_grad_(False)]

    def forward(self, x):
        if self.training:
            self.teacher[0].bias.lerp_(x.detach().mean(0), 0.1)
            for parameter in self.hidden[0].parameters():
                parameter.mul_(0.9)
        return x + self.hidden[0](self.teacher(x))


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        return x * torch.rand(4, generator=self.generator) if self.training else x


class Lazy(nn.Module):
    """A module that creates its state in the first call."""

    def forward(self, x):
        if not hasattr(self, "first"):
            self.register_buffer("first", x.detach().mean(0))
            self.calls = 0
        self.calls += 1
        return x - self.first * self.calls


class Recurrent(nn.Module):
    """A module with state that has a gradient."""

    def __init__(self):
        super().__init__()
        self.hidden = torch.zeros(4)

    def forward(self, x):
        self.hidden = (self.hidden.detach() + x.mean(0)).tanh()
        return x * self.hidden


class Mode(enum.Enum):
    LOW = 1
    HIGH = 2


class Slotted:
    __slots__ = ("mean",)

    def __init__(self):
        self.mean = torch.zeros(4)


class Helper:
    def __init__(self, of):
        self.of = of

    def shift(self):
        return self.of.mean


class Odd(nn.Module):
    """A module with unusual state: enums, slots, back references, bound methods, caches, random generators."""

    def __init__(self):
        super().__init__()
        self.mode, self.slotted, self.helper, self.shift = Mode.HIGH, Slotted(), Helper(self), self._shift
        self.seen_cache, self.random, self.numpy = {}, random.Random(1), np.random.default_rng(2)
        self.plain = types.SimpleNamespace(total=0.0)
        self.teacher = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9)).requires_grad_(False).eval()
        self.mean = torch.zeros(4)

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    def _shift(self):
        return self.mean

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.slotted.mean = self.slotted.mean + x.detach().mean(0)
            self.plain.total += x.mean().item() * self.random.random() * self.numpy.random()
            self.seen_cache["last"] = x.detach().mean(0)
        kept = self.slotted.mean + self.plain.total + self.seen_cache.get("last", 0)
        return self.teacher(x) * (2 if self.mode is Mode.HIGH else 1) + kept + self.helper.shift() + self.shift()


KEEPERS = [Assigned, InPlace, Codebook, Number, Containers, Teacher, Drawing, Lazy, Recurrent, Odd]
each = pytest.mark.parametrize("kind", KEEPERS, ids=lambda kind: kind.__name__)


def network(kind, **options):
    torch.manual_seed(0)
    ordinary = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 2))
    return partnets.partition(ordinary, PROPORTIONS, stateful=["1"], **options)


def batches(count=12):
    generator = torch.Generator().manual_seed(1)
    return [(n % 3 + 1, torch.randn(6, 4, generator=generator)) for n in range(count)]


def alone(kind, model):
    """Return a dense model for each subnetwork, with the initial state."""
    torch.manual_seed(0)
    keeper = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 2))[1]
    models = {k: partnets.merge(model, k) for k in (1, 2, 3)}
    for one in models.values():
        one[1] = copy.deepcopy(keeper)
    return models


@each
def test_each_subnetwork_keeps_what_it_has_seen_to_the_bit(kind):
    model = network(kind)
    expected = alone(kind, model)
    for k, x in batches():
        with partnets.subnetwork(model, k, k):
            y = model(x)
            y.sum().backward()
        theirs = expected[k](x)
        theirs.sum().backward()
        torch.testing.assert_close(y, theirs, rtol=1e-5, atol=1e-6)
        with partnets.subnetwork(model, k), torch.no_grad():  # this pass must not change the state
            for _ in range(2):
                model(torch.randn(6, 4))
    model.eval()
    for k, one in expected.items():
        x = torch.randn(6, 4)
        with partnets.subnetwork(model, k):
            torch.testing.assert_close(model(x), one.eval()(x), rtol=1e-5, atol=1e-6)


@each
def test_a_pass_in_which_nothing_learns_goes_on_from_there_and_leaves_nothing(kind):
    model = network(kind)
    with partnets.subnetwork(model, 2, 2), torch.no_grad():
        model(batches()[0][1])
    merged = partnets.merge(model, 2)
    for _ in range(2):
        one = copy.deepcopy(merged)
        with partnets.subnetwork(model, 2):
            for _, x in batches(4):
                torch.testing.assert_close(model(x), one(x), rtol=1e-5, atol=1e-6)
                model.eval(), one.eval()
                torch.testing.assert_close(model(x), one(x), rtol=1e-5, atol=1e-6)
                model.train(), one.train()


@pytest.mark.cases(usual=9)
@each
def test_merged_and_finalized_it_is_the_ordinary_module(kind):
    model = network(kind)
    start = alone(kind, model)[1][1]
    for k, x in batches():
        with partnets.subnetwork(model, k, k), torch.no_grad():
            model(x)
    for k in (1, 2, 3):
        merged = partnets.merge(model, k)
        assert type(merged[1]) is kind and not any(STATE_OF in name for name, _ in merged.named_modules())
        if kind is not Lazy:
            assert list(merged[1].state_dict()) == list(start.state_dict())
        with partnets.subnetwork(model.eval(), k):
            x = torch.randn(6, 4)
            torch.testing.assert_close(partnets.merge(model, k)(x), model(x), rtol=1e-5, atol=1e-6)
    fresh = partnets.finalize(model.train(), "retrain")[1]
    for (name, ours), (_, theirs) in zip(fresh.state_dict().items(), start.state_dict().items(), strict=True):
        assert torch.equal(ours, theirs), name
    x = torch.randn(6, 4)
    assert torch.equal(fresh(x), copy.deepcopy(start)(x))
    model[1].reset_parameters()
    assert torch.equal(partnets.merge(model, 2)[1](x), start(x))


@each
def test_copies_pickles_and_state_dicts_have_all_of_it(kind):
    model = network(kind)
    for k, x in batches():
        with partnets.subnetwork(model, k, k), torch.no_grad():
            model(x)
    pickled = pickle.loads(pickle.dumps(model))
    copies = [copy.deepcopy(model), pickled]
    if kind in (Assigned, InPlace, Codebook):  # their state is in the state_dict
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        loaded = network(kind)
        loaded.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        if kind is Codebook:
            loaded[1].uses = model[1].uses
        copies.append(loaded)
    for other in copies:
        for k in (1, 2, 3):
            x = torch.randn(6, 4)
            with partnets.subnetwork(model.eval(), k), partnets.subnetwork(other.eval(), k):
                assert torch.equal(other(x), model(x))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler hides it, unless warnings are errors
@ALL("kind", [InPlace, Number, Teacher])
def test_a_compiled_model_keeps_the_same(kind):
    torch.compiler.reset()
    model, eager = network(kind), network(kind)
    compiled = torch.compile(model, backend="eager")
    for k, x in batches(9):
        with partnets.subnetwork(model, k, k), partnets.subnetwork(eager, k, k):
            torch.testing.assert_close(compiled(x), eager(x))
        with partnets.subnetwork(model, k), partnets.subnetwork(eager, k):
            torch.testing.assert_close(compiled(x), eager(x))
    torch.compiler.reset()


def test_outside_it_is_that_of_subnetwork_c_and_what_is_set_is_set_for_all():
    model = network(Codebook)
    module = model[1]
    model(torch.randn(6, 4))
    assert module.last is not None and module.uses.sum() == 6
    with partnets.subnetwork(model, 1):
        assert module.last is None and module.uses.sum() == 0
    module.temperature = 0.5
    module.uses = torch.ones(5, dtype=torch.int64)
    for k in (1, 2, 3):
        with partnets.subnetwork(model, k, k):
            assert module.temperature == 0.5 and torch.equal(module.uses, torch.ones(5, dtype=torch.int64))
            module.uses += k
    with partnets.subnetwork(model, 2, 2):
        module.temperature = 0.25
        assert torch.equal(module.uses, torch.full((5,), 3)) and module.nearest(torch.randn(6, 4)).shape == (6,)
    assert module.temperature == 0.5
    del module.temperature
    with partnets.subnetwork(model, 2), pytest.raises(AttributeError, match="temperature"):
        _ = module.temperature
    assert isinstance(module, Codebook) and model.double()[1].codes.dtype == torch.float64


def test_deployed_it_is_the_ordinary_module_too():
    model = network(Codebook)
    with partnets.subnetwork(model, 3, 3):
        model(torch.randn(6, 4))
    x, deployed = torch.randn(6, 4), partnets.finalize(model, "deploy")
    assert type(deployed[1]) is Codebook
    torch.testing.assert_close(deployed(x), model.eval()(x))


@pytest.mark.full
def test_threads_keep_it_apart():
    model = network(Number)
    start, wrong = threading.Barrier(3), []

    def train(k):
        start.wait()
        for n in range(50):
            with partnets.subnetwork(model, k, k):
                model(torch.randn(6, 4))
                if model[1].steps != n + 1:
                    wrong.append(k)
            with partnets.subnetwork(model, k % 3 + 1):
                before = model[1].steps
                model(torch.randn(6, 4))
                if model[1].steps != before + 1:
                    wrong.append(k)

    threads = [threading.Thread(target=train, args=(k,)) for k in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Both(nn.Module):
    """A trainable module with parameters, a layer and state, which contains another module with state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.shift, self.factor = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.eye(4))
        self.layer, self.inner = nn.Linear(4, 4), nn.Sequential(InPlace(), nn.Linear(4, 4))
        self.pairs = [(self.layer, 2.0)]

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        for layer, factor in self.pairs:
            x = factor * layer(x)
        return self.inner(x - self.mean + self.shift) @ self.factor


@pytest.mark.full
def test_what_learns_inside_is_partitioned_as_ever():
    torch.manual_seed(0)
    model = partnets.partition(Both(), PROPORTIONS, stateful=[""])
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Both().named_parameters()]
    assert partnets.audit(model, (torch.randn(8, 4), torch.randn(8, 4)), F.mse_loss) == []
    assert partnets.audit(partnets.partition(Both(), PROPORTIONS), (torch.randn(8, 4), None))
    optimizer = torch.optim.SGD(partnets.merge(model).parameters(), 0.1)  # a merged model has only dense layers
    assert len(optimizer.param_groups[0]["params"]) == len(list(Both().parameters()))
    with partnets.subnetwork(model, 2, 1):
        model(torch.randn(8, 4)).sum().backward()
    own = dict(model.named_parameters())
    assert own["shift"].grad[0].any() and not own["shift"].grad[1:].any()
    mask = model.partitions["factor"].mask(1)
    assert own["factor"].grad[mask].any() and not own["factor"].grad[~mask].any()
    merged = partnets.merge(model, 2).eval()
    x = torch.randn(8, 4)
    with partnets.subnetwork(model.eval(), 2):
        torch.testing.assert_close(model(x), merged(x))
    assert merged.pairs[0][0] is merged.layer and type(merged.inner[0]) is InPlace


class Norm(nn.BatchNorm1d):
    """A norm class without a partitioning rule."""


@ALL("norm", [Norm, nn.InstanceNorm1d])
def test_norms_without_a_rule_keep_their_statistics(norm):
    layers = nn.Linear(4, 4), nn.Unflatten(1, (2, 2)), norm(2, track_running_stats=True), nn.Flatten(), nn.Linear(4, 2)
    model = nn.Sequential(*layers)
    with pytest.raises(ValueError, match="stateful="):
        partnets.partition(model, PROPORTIONS)
    model = partnets.partition(model, PROPORTIONS, stateful=["2"])
    assert partnets.audit(model, (torch.randn(8, 4), None)) == []
    with partnets.subnetwork(model, 2, 2):
        model(torch.randn(8, 4))
    means = [state.running_mean.any() for state in model[2]._modules[STATE_OF].values()]
    assert means == [False, False, True, False]


@pytest.mark.full
def test_a_trainer_trains_it(tmp_path):
    x = torch.randn(60, 4)
    chunks = partnets.chunk((x, (x.sum(1) > 0).long()), (0.5, 0.3, 0.2))
    mask = partnets.hyper.InputMask(4)

    def trainer():
        torch.manual_seed(0)
        model = nn.Sequential(mask, nn.Linear(4, 4), Codebook(), nn.Linear(4, 2))
        model = partnets.partition(model, PROPORTIONS, stateful=["2"])
        return partnets.Trainer(model, chunks, hyper=mask, batch_size=20)

    first = trainer()
    first.fit(6)
    first.save(tmp_path / "state.pt")
    uses = [state.uses.sum().item() for state in first.model[2]._modules[STATE_OF].values()]
    assert uses[0] == 0 and all(uses[1:]) and sum(uses) == 6 * 20
    second = trainer()
    second.load(tmp_path / "state.pt")
    for k in range(4):
        ours, theirs = (one.model[2]._modules[STATE_OF][str(k)].codes for one in (second, first))
        assert torch.equal(ours, theirs)


class Ends(nn.Module):
    """Two trainable modules that share a module with state, and a list."""

    def __init__(self):
        super().__init__()
        self.first, self.last = End(codes := InPlace(), seen := []), End(codes, seen)

    def forward(self, x):
        return self.last(self.first(x))


class End(nn.Module):
    def __init__(self, codes, seen):
        super().__init__()
        self.layer, self.codes, self.seen = nn.Linear(4, 4), codes, seen

    def forward(self, x):
        if self.training:
            self.seen.append(x.detach().mean(0))
        return self.codes(self.layer(x)) + sum(self.seen)


@ALL("stateful", [[""], ["first", "last"]])
def test_what_several_modules_keep_together_they_go_on_keeping_together(stateful):
    torch.manual_seed(0)
    model = partnets.partition(Ends(), PROPORTIONS, stateful=stateful)
    expected = {k: partnets.merge(model, k) for k in (1, 2, 3)}
    assert all(one.first.codes is one.last.codes and one.first.seen is one.last.seen for one in expected.values())
    for k, x in batches():
        for update in (k, None):
            one = expected[k] if update else copy.deepcopy(expected[k])
            with partnets.subnetwork(model, k, update), torch.no_grad():
                torch.testing.assert_close(model(x), one(x), rtol=1e-4, atol=1e-5)


class Bound(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.scaled = nn.Parameter(torch.ones(4)), self._scaled

    def _scaled(self, x):
        return x * self.scale

    def forward(self, x):
        return self.scaled(x)


def test_a_method_that_a_module_keeps_is_its_own_after_merging():
    model = partnets.finalize(partnets.partition(nn.Sequential(nn.Linear(4, 4), Bound()), PROPORTIONS), "finetune")
    model(torch.randn(3, 4)).sum().backward()
    assert model[1].scaled.__self__ is model[1] and model[1].scale.grad is not None


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("stats", torch.zeros(2, 4))
        self.mean = self.stats[0]


class Setting(Assigned):
    def __setattr__(self, name, value):
        super().__setattr__(name, value)


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.jit.script(nn.BatchNorm1d(4))


class Goes(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4))
        self.register_buffer("mean", torch.zeros(4))


class Named(Assigned):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))


class Extra(Assigned):
    def get_extra_state(self):
        return {}


class Went(nn.Sequential):
    pass


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@ALL(("stateful", "module", "message"), [
    (["1"], Named, "whose count is partnets' own name"),
    (["1"], Extra, "get_extra_state"),
    (["nowhere"], Assigned, "stateful names 'nowhere'"),
    (["0"], Assigned, "stateful names Linear, which keep nothing"),
    (["1"], Went, "stateful names Went, which keep nothing"),
    (["1"], Views, "1.stats and 1.mean share memory"),
    (["1"], Setting, "__setattr__ of its own"),
    (["1"], Scripted, "ScriptModule"),
    (["1"], Goes, "goes through the modules in it"),
    (["1"], torch.ao.quantization.FakeQuantize, "cannot be changed in place"),
])  # fmt: skip
def test_what_cannot_be_kept_apart_is_refused(stateful, module, message):
    model = nn.Sequential(nn.Linear(4, 4), module())
    before = [id(one) for one in model.modules()], type(model[1])
    with pytest.raises(ValueError, match=message):
        partnets.partition(model, PROPORTIONS, stateful=stateful)
    assert before == ([id(one) for one in model.modules()], type(model[1]))


def test_of_one_partition_it_stays_as_it_is():
    model = partnets.partition(nn.Sequential(nn.Linear(4, 4), Codebook()), (1.0,), stateful="1")
    model(torch.randn(6, 4))
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.codes"]


@pytest.mark.parametrize("in_buffers", [True, False])
def test_what_restore_best_leaves_as_it_is_is_told_of(in_buffers):
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            if in_buffers:
                self.register_buffer("mean", torch.zeros(4))
            else:
                self.mean = torch.zeros(4)

        def forward(self, x):
            if self.training:
                self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
            return x - self.mean

    model = partnets.partition(nn.Sequential(Mean(), nn.Linear(4, 2)), (0.6, 0.4), stateful=["0"])
    chunks = partnets.chunk((torch.randn(60, 4), torch.randint(2, (60,))), (0.6, 0.4))
    one = partnets.Trainer(model, chunks, batch_size=16, lml_every=2, keep_best=True)
    one.fit(4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        one.restore_best()
    assert [str(each.message)[:35] for each in told] == ["0 keeps tensors in attributes, whic"] * (not in_buffers)
