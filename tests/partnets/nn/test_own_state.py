"""State that a module keeps between calls is per subnetwork; compared with one dense module for each."""

import contextlib
import copy
import enum
import functools
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
from torch import nn

import partnets
from partnets.evaluation.snapshot import Snapshot

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


class Views(nn.Module):
    """A buffer, a view of it in an attribute, and a buffer that is set to something else each time."""

    def __init__(self):
        super().__init__()
        self.register_buffer("stats", torch.zeros(2, 4))
        self.register_buffer("weight_mean", torch.zeros(4))
        self.mean = self.stats[0]

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
            self.weight_mean = self.stats[0] + 1
        return x - self.stats[0] * self.weight_mean


class Both(nn.Module):
    """A trainable module with parameters, a layer and state, which contains another module with state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight_mean", torch.zeros(4))
        self.weight, self.factor = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.eye(4))
        self.layer, self.inner = nn.Linear(4, 4), nn.Sequential(InPlace(), nn.Linear(4, 4))
        self.pairs = [(self.layer, 2.0)]

    def forward(self, x):
        if self.training:
            self.weight_mean.lerp_(x.detach().mean(0), 0.1)
        for layer, factor in self.pairs:
            x = factor * layer(x)
        return self.inner(x - self.weight_mean + self.weight) @ self.factor


class End(nn.Module):
    def __init__(self, codes, seen):
        super().__init__()
        self.layer, self.codes, self.seen = nn.Linear(4, 4), codes, seen

    def forward(self, x):
        if self.training:
            self.seen.append(x.detach().mean(0))
        return self.codes(self.layer(x)) + sum(self.seen)


class Ends(nn.Module):
    """Two trainable modules that share a module with state, and a list."""

    def __init__(self):
        super().__init__()
        self.first, self.last = End(codes := InPlace(), seen := []), End(codes, seen)

    def forward(self, x):
        return self.last(self.first(x))


KEEPERS = [
    Assigned, InPlace, Codebook, Number, Containers, Teacher, Drawing, Lazy, Recurrent, Odd, Views, Both, Ends,
]  # fmt: skip
each = pytest.mark.parametrize("kind", KEEPERS, ids=lambda kind: kind.__name__)
pytestmark = pytest.mark.filterwarnings("ignore:the running statistics of 1 BatchNorm")  # which no test estimates
close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


def dense(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 2))


def network(kind, stateful=("1",)):
    return partnets.partition(dense(kind), PROPORTIONS, stateful=stateful, defaults="zero")


def batches(count=12):
    generator = torch.Generator().manual_seed(1)
    return [(n % 3 + 1, torch.randn(6, 4, generator=generator)) for n in range(count)]


def train(model, given=None):
    for k, x in batches() if given is None else given:
        with partnets.subnetwork(model, k, k), torch.no_grad():
            model(x)
    return model


@each
def test_each_subnetwork_keeps_what_its_dense_module_does(kind):
    model = network(kind)
    expected = {k: partnets.merge(model, k) for k in (1, 2, 3)}
    for k, x in batches():
        with partnets.subnetwork(model, k, k):
            y = model(x)
            y.sum().backward()
        theirs = expected[k](x)
        theirs.sum().backward()
        close(y, theirs)
        copied = copy.deepcopy(expected[k]) if kind is not Recurrent else None  # whose state has a graph, as in torch
        with partnets.subnetwork(model, k), torch.no_grad():  # continues from there and leaves nothing
            for noise in torch.randn(2, 6, 4):
                y = model(noise)
                if copied is not None:
                    close(y, copied(noise))
    for k, one in expected.items():
        x = torch.randn(6, 4)
        if kind is not Recurrent:
            close(partnets.merge(model, k).eval()(x), copy.deepcopy(one).eval()(x))
        with partnets.subnetwork(model.eval(), k):
            close(model(x), one.eval()(x))
        model.train()


@each
def test_merged_and_finalized_it_is_the_module_of_that_subnetwork(kind):
    model, start = train(network(kind)), dense(kind)[1]
    for k in (1, 2, 3):
        merged = partnets.merge(model, k)
        assert type(merged[1]) is type(start) and not any("_of_" in name for name in merged.state_dict())
        assert not any(one._forward_hooks or one._forward_pre_hooks for one in merged.modules())
        if kind is not Lazy:
            assert list(merged[1].state_dict()) == list(start.state_dict())
    if kind is Both:
        assert merged[1].pairs[0][0] is merged[1].layer
    if kind is Ends:
        assert merged[1].first.codes is merged[1].last.codes and merged[1].first.seen is merged[1].last.seen
    if kind not in (Both, Ends):  # whose parameters are drawn again
        fresh, x = partnets.finalize(model, "retrain")[1], torch.randn(6, 4)
        for (name, ours), (_, theirs) in zip(fresh.state_dict().items(), start.state_dict().items(), strict=True):
            assert torch.equal(ours, theirs), name
        assert torch.equal(fresh(x), start(x))


@each
def test_copies_pickles_and_state_dicts_have_all_of_it(kind):
    model = train(network(kind))
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    if kind in (Assigned, InPlace, Codebook):  # their state is in the state_dict
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        others.append(network(kind))
        others[-1].load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    for other in others:
        for k in (1, 2, 3):
            x = torch.randn(6, 4)
            with partnets.subnetwork(model.eval(), k), partnets.subnetwork(other.eval(), k):
                assert torch.equal(other(x), model(x))


@each
def test_a_number_for_each_example_reads_and_changes_that_of_its_subnetwork(kind):
    model, other, x = network(kind), network(kind), torch.randn(12, 4)
    ks = torch.tensor([1, 2, 3]).repeat_interleave(4)
    for update in (None, ks, None):
        with partnets.subnetwork(model, ks, update), torch.no_grad():
            y = model(x)
        for k in (1, 2, 3):
            with partnets.subnetwork(other, k, None if update is None else k), torch.no_grad():
                close(y[ks == k], other(x[ks == k]))


@each
def test_audits_find_nothing_and_change_nothing(kind):
    model = network(kind)
    before = Snapshot(model)
    assert partnets.audit(model, (torch.randn(8, 4), None)) == [] and not before.changed(Snapshot(model))
    if kind is not Drawing:  # which draws as often for any data
        assert partnets.audit(network(kind, ()), (torch.randn(8, 4), None))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler hides it, unless warnings are errors
@pytest.mark.parametrize("kind", [InPlace, Number, Teacher])
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
    model(torch.randn(6, 4))
    del module.temperature
    with partnets.subnetwork(model, 2), pytest.raises(AttributeError, match="temperature"):
        _ = module.temperature
    assert isinstance(module, Codebook) and model.double()[1].codes.dtype == torch.float64


@pytest.mark.parametrize("fails", [False, True])
def test_what_calls_outside_assign_is_that_of_subnetwork_c(fails):
    """Also where a parent assigns it, and what was assigned before the call is that of all."""

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.factor = torch.zeros(4), 1.0

        def forward(self, x):
            self[0].shift = self.mean = x.detach().mean(0)
            if fails:
                raise ZeroDivisionError
            return x - self.mean

    class Wrapped(Parent, nn.Sequential):
        def __init__(self):
            super().__init__()
            self.append(nn.Identity())

    model = network(Wrapped)
    model[1].factor = 2.0
    with contextlib.suppress(ZeroDivisionError):
        model[1](torch.randn(6, 4))
    assert model[1].mean.any() and model[1][0].shift.any()
    with partnets.subnetwork(model, 2, 2):
        assert not model[1].mean.any() and not hasattr(model[1][0], "shift") and model[1].factor == 2.0


def test_evaluations_leave_the_same_objects():
    model = network(Codebook)
    before = model[1].codes, model[1].uses
    with partnets.subnetwork(model, 3):
        assert model[1].codes is not before[0]
        model(torch.randn(6, 4))
    assert (model[1].codes, model[1].uses) == before and not model[1].uses.any()


def test_deployed_it_is_the_dense_module_too():
    model = network(Codebook)
    with partnets.subnetwork(model, 3, 3):
        model(torch.randn(6, 4))
    x, deployed = torch.randn(6, 4), partnets.finalize(model, "deploy")
    assert type(deployed[1]) is Codebook
    torch.testing.assert_close(deployed(x), model.eval()(x))


def test_what_learns_inside_is_partitioned_as_ever():
    torch.manual_seed(0)
    model = partnets.partition(Both(), PROPORTIONS, stateful=[""])
    with partnets.subnetwork(model, 2, 1):
        model(torch.randn(8, 4)).sum().backward()
        assert model.weight.grad.any()
    mask = partnets.partitions(model)["factor"].mask(1)
    assert model.factor.grad[mask].any() and not model.factor.grad[~mask].any()
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in Both().named_parameters()}


@pytest.mark.full
def test_a_trainer_trains_it(tmp_path):
    x = torch.randn(60, 4)
    chunks = partnets.chunk((x, (x.sum(1) > 0).long()), PROPORTIONS)
    mask = partnets.hyper.InputMask(4)

    def trainer():
        torch.manual_seed(0)
        model = nn.Sequential(mask, nn.Linear(4, 4), Codebook(), nn.Linear(4, 2))
        model = partnets.partition(model, PROPORTIONS, stateful=["2"])
        return partnets.Trainer(model, chunks, hyper=mask, batch_size=20)

    first = trainer()
    first.fit(6)
    first.save(tmp_path / "state.pt")
    codebook = first.model[2]
    uses = [codebook.uses_of_0, codebook.uses_of_1, codebook.uses_of_2, codebook.uses]
    assert not uses[0].any() and all(map(torch.any, uses[1:])) and sum(uses).sum() == 6 * 20
    second = trainer()
    second.load(tmp_path / "state.pt")
    for name in ("codes_of_0", "codes_of_1", "codes_of_2", "codes"):
        assert torch.equal(getattr(second.model[2], name), getattr(codebook, name))


class Named(Assigned):
    def __init__(self):
        super().__init__()
        self.register_buffer("best_of_3", torch.zeros(()))


class Norm(nn.Linear):
    """A layer with running statistics, and no rule for them."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("running_mean", torch.zeros(4))


class Locked(Assigned):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.jit.script(nn.BatchNorm1d(4, affine=False))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(("stateful", "module", "message"), [
    (["1"], Named, "Named .*with a best_of_3"),
    (["1"], Locked, r"an attribute of 1 \(Locked\) cannot be copied for each subnetwork: .*lock"),
    (["1"], Scripted, "compiled code"),
    (["nowhere"], Assigned, "stateful names 'nowhere'"),
    ([], Norm, "name it in stateful=, or register a rule"),
])  # fmt: skip
def test_what_cannot_be_kept_apart_is_refused(stateful, module, message):
    model = nn.Sequential(nn.Linear(4, 4), module())
    before = list(model.state_dict())
    with pytest.raises(ValueError, match=message):
        partnets.partition(model, PROPORTIONS, stateful=stateful)
    assert before == list(model.state_dict()) and not partnets.subnetworks.state.partitioned_modules(model)


def test_of_one_partition_it_stays_as_it_is():
    model = partnets.partition(nn.Sequential(nn.Linear(4, 4), Codebook()), (1.0,), stateful="1")
    model(torch.randn(6, 4))
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.codes"]


class Mean(nn.Module):
    mean = 0.0

    def forward(self, x):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x - self.mean


@pytest.mark.parametrize("kind", [Assigned, Mean])
def test_what_restore_best_does_not_restore_is_named(kind):
    model = partnets.partition(nn.Sequential(kind(), nn.Linear(4, 2)), (0.6, 0.4), stateful=["0"])
    chunks = partnets.chunk((torch.randn(60, 4), torch.randint(2, (60,))), (0.6, 0.4))
    one = partnets.Trainer(model, chunks, batch_size=16, lml_every=2, keep_best=True)
    one.fit(4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one.restore_best()
    assert [str(each.message)[:35] for each in caught] == ["0 keeps tensors in attributes, whic"] * (kind is Mean)
