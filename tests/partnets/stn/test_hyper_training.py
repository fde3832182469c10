"""Training steps and trainer of self-tuning networks."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from pairwise import pairwise
from torch import nn

import partnets
from partnets import hyper, optim, stn
from partnets.hyper import hyperparameters
from partnets.stn.converting import vector_of
from partnets.subnetworks.parameters import partitioned_parameters

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] * X[:, 1] > 0).long()
DATA = X, Y
PROPORTIONS = (0.5, 0.3, 0.2)


def network():
    dropout, noise = hyper.Dropout(0.3), hyper.InputNoise(0.1)
    layers = nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), dropout, nn.Linear(8, 2)
    penalty = hyper.ActivationPenalty(0.01, range=hyper.logarithmic(1e-4, 1.0))
    return nn.Sequential(noise, *layers[:3], penalty, *layers[3:])


def hypers(model):
    return [module for module in model.modules() if isinstance(module, hyper.Hyperparameter)]


def converted(**options):
    torch.manual_seed(0)
    model = network()
    return stn.convert(model, hypers(model), **options)


def held_out(**options):
    return partnets.held_out(converted(**options), DATA, validation=0.25)


def partitioned(**options):
    model = partnets.partition(converted(**options), PROPORTIONS, defaults="stored")
    return model, partnets.chunk(DATA, PROPORTIONS)


MADE = {
    "validation set": lambda: held_out(centred=False),
    "validation set, centred": held_out,
    "validation set, fixed scale": lambda: held_out(learn_scale=False, per_example=False),
    "L_ML": lambda: partitioned(centred=False),
    "L_ML, centred": partitioned,
    "validation set, linearised": lambda: held_out(linearised=True),
    "L_ML, linearised": lambda: partitioned(linearised=True),
}
each_made = pytest.mark.parametrize("make", MADE.values(), ids=MADE)


def trainer(model, chunks, **options):
    torch.manual_seed(1)
    options = {"batch_size": 8, "hyper_every": 2, "lml_every": 3, "clip": 1.0} | options
    return stn.Trainer(model, chunks, optimizer=optim.Adam(model, lr=1e-2), **options)


def response_names(model):
    return {name for name, _ in model.named_parameters() if "hyper_" in name or name.endswith("_scale")}


@pytest.mark.parametrize("centred", [False, True])
def test_a_step_of_the_weights_is_algorithm_1(centred):
    network = converted(centred=centred)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    model = partnets.Ensemble([network], count=2)
    expected = copy.deepcopy(network)

    def loss_of(module):
        with hyper.penalties() as found:
            loss = F.cross_entropy(module(X[:6]), Y[:6])
        return loss + sum(penalty.mean() for penalty in found)

    vector, names = vector_of(expected), response_names(expected)
    psi = set(hyperparameters(expected))
    torch.manual_seed(3)
    if centred:
        with vector.at(vector.present().detach()):
            loss_of(expected).backward()
        assert not any(p.grad.any() for n, p in expected.named_parameters() if n in names and p.grad is not None)
    elementary = {n: p.grad.clone() for n, p in expected.named_parameters() if p.grad is not None and n not in names}
    expected.zero_grad()
    noise = torch.randn(6, vector.size)
    with vector.at((vector.present() + vector.scale() * noise).detach()):
        loss_of(expected).backward()

    torch.manual_seed(3)
    optimizer = optim.SGD(model, lr=0.5)
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    stn.step_weights(model, optimizer, 1, (X[:6], Y[:6]), lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
    for name, parameter in expected.named_parameters():
        now = network.get_parameter(name)
        if parameter in psi:
            assert torch.equal(now, before[name]) and now.grad is None
            continue
        grad = elementary[name] if centred and name not in names else parameter.grad
        torch.testing.assert_close(now, before[name] - 0.5 * grad)


def test_a_layer_that_does_not_respond_learns_at_the_present_hyperparameters_alone():
    network = converted(skip=["6"])
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    expected, model = copy.deepcopy(network), partnets.Ensemble([network], count=2)
    torch.manual_seed(3)
    with vector_of(expected).at_present(), hyper.penalties():
        F.cross_entropy(expected(X[:6]), Y[:6]).backward()
    torch.manual_seed(3)
    before = network[6].weight.detach().clone()
    optimizer = optim.SGD(model, lr=0.5)
    stn.step_weights(model, optimizer, 1, (X[:6], Y[:6]), lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
    torch.testing.assert_close(network[6].weight, before - 0.5 * expected[6].weight.grad)


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("per_example", [True, False])
def test_a_linearised_response_learns_by_outputs_that_are_linear_in_it(per_example):
    network = converted(linearised=True, per_example=per_example).double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    model, expected = partnets.Ensemble([network], count=2), copy.deepcopy(network)
    x, y = X[:6].double(), Y[:6]
    vector = vector_of(expected)
    torch.manual_seed(3)
    noise = torch.randn((6, vector.size) if per_example else vector.size, dtype=torch.float64)

    def response(t):
        with vector.at(vector.present() + t * step):
            return expected(x)

    step = (vector.scale() * noise).detach()
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    F.cross_entropy(sum(torch.func.jvp(response, (zero,), (one,))), y).backward()
    torch.manual_seed(3)
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    optimizer = optim.SGD(model, lr=0.5)
    stn.step_weights(model, optimizer, 1, (x, y), lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
    names = [name for name in response_names(network) if not name.endswith("scale_raw")]
    assert len(names) == 12
    for name in names:
        moved = before[name] - 0.5 * expected.get_parameter(name).grad
        torch.testing.assert_close(network.get_parameter(name), moved)


def test_penalties_of_a_linearised_response_are_whole():
    """Check that the linearised loss of a linear model with quadratic penalties is exact."""
    found = []
    for linearised in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(4, 2)
        decay = hyper.WeightDecay(layer, 0.3)
        penalty = hyper.ActivationPenalty(0.5, range=hyper.logarithmic(1e-3, 1.0))
        network = stn.convert(nn.Sequential(layer, decay, penalty), [decay, penalty], linearised=linearised)
        nn.init.normal_(network[0].weight_scale)
        model = partnets.Ensemble([network], count=2)
        stn.step_weights(model, optim.SGD(model, lr=0.5), 1, (X, Y), lambda b, m=model: F.cross_entropy(m(b[0]), b[1]))
        found.append(dict(network.named_parameters()))
    for name, parameter in found[0].items():
        torch.testing.assert_close(found[1][name], parameter)


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class WithoutForwardMode(nn.Module):
    def forward(self, x):
        return _Twice.apply(x)


def test_partitioned_layers_that_do_not_respond_are_linearised_too():
    """Check that a linearised step of partition 1 is that of the dense subnetwork 1, for the entries that it owns."""
    network = converted(linearised=True, skip=["6"]).double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    model = partnets.partition(network, PROPORTIONS, defaults="stored")
    dense = partnets.merge(model, 1)
    for each in (model, partnets.Ensemble([dense], count=3)):
        torch.manual_seed(3)
        step = {"model": each, "optimizer": optim.SGD(each, lr=0.5), "k": 1, "batch": (X[:6].double(), Y[:6])}
        stn.step_weights(**step, loss=lambda batch, each=each: F.cross_entropy(each(batch[0]), batch[1]))
    stepped = dict(partnets.merge(model, 1).named_parameters())
    partitions = partnets.partitions(model)
    for name, parameter in dense.named_parameters():
        mine = partitions[name].mask(1) if name in partitions else ...
        torch.testing.assert_close(stepped[name][mine], parameter[mine], rtol=1e-10, atol=1e-10)


def test_what_a_linearised_response_cannot_see_is_refused():
    network = converted(linearised=True)
    model = partnets.Ensemble([network], count=2)
    optimizer = optim.SGD(model, lr=0.5)
    with pytest.raises(RuntimeError, match="not computed from the output"):
        stn.step_weights(model, optimizer, 1, (X, Y), lambda batch: F.cross_entropy(network(batch[0]), batch[1]))
    network = converted(linearised=True)
    network.append(WithoutForwardMode())
    model = partnets.partition(network, PROPORTIONS, defaults="stored")
    with pytest.raises(RuntimeError, match="forward mode"):
        stn.step_weights(model, optim.SGD(model, lr=0.5), 1, (X, Y), lambda batch: F.cross_entropy(model(batch[0]), Y))
    with pytest.raises(ValueError, match="centred=True"):
        converted(linearised=True, centred=False)


def test_a_step_of_the_hyperparameters_is_algorithm_1():
    network = converted()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    model, expected = partnets.Ensemble([network], count=2), copy.deepcopy(network)
    optimizer = torch.optim.SGD(hyperparameters(model), lr=0.5)
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    modes = []

    def loss(batch):
        modes.append({module.training for module in model.modules()})
        return F.cross_entropy(model(batch[0]), batch[1])

    torch.manual_seed(3)
    value = stn.step_hyper(model, optimizer, {2: (X[:6], Y[:6])}, loss, entropy=0.1)
    assert modes == [{False}] and network.training

    vector = vector_of(expected)
    torch.manual_seed(3)
    noise = torch.randn(6, vector.size)
    with vector.at(vector.present() + vector.scale() * noise):
        plain = F.cross_entropy(expected.eval()(X[:6]), Y[:6])
    entropy = torch.distributions.Normal(torch.zeros(vector.size), vector.scale()).entropy().sum()
    (plain - 0.1 * entropy).backward()
    torch.testing.assert_close(value, plain.detach())
    for name, parameter in expected.named_parameters():
        moved = before[name] - 0.5 * parameter.grad if parameter in set(hyperparameters(expected)) else before[name]
        torch.testing.assert_close(network.get_parameter(name), moved)


@pytest.mark.cases(usual=1)
@each_made
def test_training_learns_everything(make):
    model, chunks = make()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    training = trainer(model, chunks)
    history = training.fit(12)
    scales_learn = vector_of(model).learned[0].scale_raw.requires_grad
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name.endswith("scale_raw") and not scales_learn), name
    assert [loss is not None for loss in history.steps["hyper_loss"]] == [False, True] * 6
    paths = [name for name in history.values if not name.endswith(", scale")]
    assert len(paths) == 3 and len(history.values) == 6
    assert history.lml["step"] == [3, 6, 9, 12]
    expected = partnets.lml(model, chunks, F.cross_entropy)
    assert history.lml["lml"][-1] == pytest.approx(expected)


@pytest.mark.cases(usual=0, full=4)
@pairwise(strength=1, make=MADE, stop=[1, 4, 5])
def test_resuming_gives_the_same_bits(make, stop, tmp_path):
    model, chunks = make()
    trainer(model, chunks).fit(8)
    other, _ = make()
    first = trainer(other, chunks)
    first.fit(stop)
    first.save(tmp_path / "checkpoint.pt")
    third, _ = make()
    resumed = trainer(third, chunks)
    resumed.load(tmp_path / "checkpoint.pt")
    resumed.fit(8 - stop)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, third.get_parameter(name)), name


@pytest.mark.full
def test_workers_fetch_the_same_batches():
    found = []
    for loading in ({}, {"num_workers": 1}):
        model, chunks = held_out()
        trainer(model, chunks, hyper_steps=2, hyper_after=1, **loading).fit(5)
        found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(*found)


@pytest.mark.full
@pytest.mark.parametrize("centred", [False, True])
def test_later_chunks_reach_no_earlier_partition(centred):
    """Check that, with fixed hyperparameters, D_2 and D_3 do not affect partition 1, nor D_3 partition 2."""
    found = {}
    for changed in (None, 2, 3):
        model, chunks = partitioned(centred=centred)
        if changed is not None:
            inside = chunks.order[sum(chunks.sizes[: changed - 1]) : sum(chunks.sizes[:changed])]
            data = X.clone()
            data[inside] = 100.0
            chunks = partnets.Chunks(torch.utils.data.TensorDataset(data, Y), chunks.order, chunks.sizes)
        rate = torch.optim.SGD([p for p in hyperparameters(model) if p.requires_grad], lr=0.0)
        training = trainer(model, chunks, hyper_optimizer=rate, lml_every=None, other_chunks=True)
        training.fit(30)
        found[changed] = model
    for changed, unseen in ((2, [1]), (3, [1, 2])):
        for k in unseen:
            for one, other in zip(*(partitioned_parameters(found[i]) for i in (None, changed)), strict=True):
                assert torch.equal(one.take(one.stored, k), other.take(other.stored, k)), (one, k)
    assert any(not torch.equal(p, found[3].get_parameter(name)) for name, p in found[None].named_parameters())


def test_label_smoothing_is_a_loss_of_training_alone():
    smoothing = hyper.LabelSmoothing(0.3)
    model = nn.Sequential(nn.Linear(4, 2), smoothing)
    stn.convert(model, smoothing)
    ensemble, chunks = partnets.held_out(model, DATA, validation=0.25)
    training = trainer(ensemble, chunks, loss=smoothing)
    assert training.hyper_loss is F.cross_entropy
    training.fit(6)
    assert smoothing.values()["smoothing"] != pytest.approx(0.3)


@pytest.mark.full
def test_it_tunes():
    """Flip 40 % of the labels, so that the network must not fit them and the decay has to grow."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(240, 30, generator=generator)
    y = (x[:, 0] > 0).long()
    noisy = torch.where(torch.rand(240, generator=generator) < 0.4, 1 - y, y)
    layer = nn.Linear(30, 2)
    decay = hyper.WeightDecay(layer, 1e-4, range=hyper.logarithmic(1e-6, 1.0))
    model = nn.Sequential(layer, decay)
    stn.convert(model, decay, scale=0.5)
    ensemble, chunks = partnets.held_out(model, (x, noisy), validation=0.5)
    rates = {"hyper_optimizer": torch.optim.Adam(hyperparameters(ensemble), lr=3e-2)}
    training = trainer(ensemble, chunks, batch_size=120, hyper_every=1, hyper_after=100, lml_every=100, **rates)
    history = training.fit(600)
    assert decay.values()["decay"] > 1e-2
    assert history.lml["lml"][-1] > history.lml["lml"][0]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: stn.convert(nn.Sequential(nn.ReLU(), d := hyper.Dropout()), d), ValueError, "no layer of this"),
        (lambda: stn.convert(nn.Linear(2, 2), hyper.Dropout()), ValueError, "not inside the model"),
        (lambda: stn.convert(m := nn.Sequential(nn.Linear(2, 2), nn.ReLU()), m[1]), TypeError, "has a ReLU; derive it"),
        (lambda: stn.convert(m := converted(), hypers(m)), ValueError, "respond to hyperparameters already"),
        (lambda: stn.convert(partitioned()[0], []), ValueError, "is partitioned already"),
        (lambda: converted(scale=0.0), ValueError, "scale=0.0; pass a positive number"),
        (lambda: converted(skip=["7"]), ValueError, "skip names '7'"),
        (lambda: stn.freeze(network()), ValueError, "read no hyperparameters; call stn.convert"),
        (lambda: stn.freeze(converted(), {"5.rate": 0.95}), ValueError, r"value=0.95; pass a number between 0 and 0.9"),
        (
            lambda: stn.freeze(converted(), {"rate": 0.5}),
            ValueError,
            r"has rate; .* are 0.std, 4.strength, 5.rate",
        ),
        (lambda: hyper.Dropout(1.5), ValueError, "rate=1.5; pass a number between 0 and 0.9"),
        (lambda: trainer(*held_out(), hyper_steps=0), ValueError, "hyper_steps=0; pass an int, at least 1"),
        (lambda: trainer(*held_out(), hyper_every=0), ValueError, "hyper_every=0; pass an int, at least 1"),
        (lambda: trainer(*held_out(), entropy=-1.0), ValueError, "entropy=-1.0; pass the weight"),
        (lambda: trainer(*partnets.held_out(network(), DATA)), ValueError, "call stn.convert"),
        (lambda: trainer(*held_out(), hyper=hyper.Dropout()), ValueError, "not inside the model"),
        (lambda: stn.HyperVector([]), ValueError, "no numbers to tune"),
        (lambda: stn.HyperVector(hyper.Submodule(nn.Linear(2, 2))), ValueError, "no numbers to tune"),
    ],
)
def test_wrong_use(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_refused_conversion_changes_nothing():
    model = nn.Sequential(nn.ReLU(), dropout := hyper.Dropout())
    with pytest.raises(ValueError):
        stn.convert(model, dropout)
    assert dropout.rate.scale_raw is None
    frozen = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), dropout)
    with pytest.raises(ValueError, match="that learn"):
        stn.convert(frozen, dropout)
    assert type(frozen[0]) is nn.Linear
    kept = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), dropout)
    inner = kept[1].forward
    kept[1].forward = lambda x: 2 * inner(x)
    with pytest.raises(ValueError, match="the forward of 1 was replaced by an attribute"):
        stn.convert(kept, dropout)
    assert type(kept[0]) is nn.Linear
    assert type(stn.convert(kept, dropout, skip="1")[1]) is nn.Linear


def test_running_statistics_are_those_of_before():
    model = nn.Sequential(norm := nn.BatchNorm1d(3), dropout := hyper.Dropout())
    norm(torch.randn(20, 3) * 2 + 1)
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    converted = stn.convert(model, dropout)[0]
    assert all(torch.equal(buffer, before[name]) for name, buffer in converted.named_buffers())
    assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())


def test_an_ordinary_trainer_says_what_it_lacks():
    """Check that partnets.Trainer is rejected: without perturbation, neither responses nor scales learn."""
    model, chunks = held_out()
    with pytest.raises(ValueError, match=r"responds to hyperparameters; train it by partnets\.stn\.Trainer"):
        partnets.Trainer(model, chunks, hyper=hypers(model), sampling=(1, 0)).fit(1)


def test_layers_that_share_a_parameter_stay_and_reading_a_response_raises():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5)
            self.read = nn.Linear(4, 4)
            self.head.weight = self.table.weight
            self.dropout = hyper.Dropout()

        def forward(self, ids):
            return self.head(F.linear(self.layer(self.table(ids)), self.read.weight))

    model = Tied()
    stn.convert(model, model.dropout)
    kinds = {name: type(child).__name__ for name, child in model.named_children()}
    assert kinds == {
        "table": "HyperEmbedding",
        "layer": "HyperLinear",
        "head": "Linear",
        "read": "HyperLinear",
        "dropout": "Dropout",
    }
    assert model.head.weight is model.table.weight
    ids = torch.tensor([[1, 2], [3, 4]])
    with vector_of(model).perturbed(2), pytest.raises(RuntimeError, match=r"weight of this HyperLinear.*skip="):
        model(ids)
    model = Tied()
    stn.convert(model, model.dropout, skip=["read"])
    with vector_of(model).perturbed(2):
        assert type(model.read) is nn.Linear and model(ids).shape == (2, 2, 5)


def test_encoder_layers_leave_their_fast_path():
    """Check that torch's fast path in evaluation, which would ignore the responses, is disabled."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), dropout := hyper.Dropout()).eval()
    x = torch.randn(3, 5, 8)
    before = model(x)
    stn.convert(model, dropout, centred=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 5)
        expected, frozen = model(x), stn.freeze(model)
    with torch.enable_grad():
        torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(frozen(x), expected)
    assert not torch.allclose(before, expected)


def test_drop_connect():
    torch.manual_seed(0)
    for layer, x in ((nn.LSTM(4, 6, 2), torch.randn(3, 5, 4)), (nn.Linear(4, 6), torch.randn(3, 4))):
        layer.drop_connect = hyper.DropConnect(0.5)
        model = stn.convert(nn.Sequential(layer), layer.drop_connect, batch_dim=1 if x.dim() == 3 else 0)
        first, second = (model(x)[0] for _ in range(2))
        assert not torch.equal(first, second)
        model.eval()
        assert torch.equal(model(x)[0], model(x)[0])
        model.train()
        with vector_of(model).perturbed(x.shape[1] if x.dim() == 3 else 3):
            first, second = (model(x)[0] for _ in range(2))
        assert not torch.equal(first, second)
        frozen = stn.freeze(model)
        torch.testing.assert_close(frozen(x)[0], model.eval()(x)[0])
        assert not hasattr(frozen[0], "drop_connect")


def test_a_hyperparameters_entropy_is_that_of_normal_draws():
    vector = vector_of(converted(scale=0.7))
    expected = vector.size * (math.log(0.7) + 0.5 * math.log(2 * math.pi * math.e))
    assert vector.entropy().item() == pytest.approx(expected, rel=1e-6)
    with torch.no_grad():
        draws = []
        for _ in range(3):
            with vector.perturbed(4000):
                draws.append(vector.input())
    assert torch.cat(draws).std(0).tolist() == pytest.approx([0.7] * 3, rel=0.05)


def test_recomputed_activations_are_those_of_the_same_hyperparameters():
    from torch.utils.checkpoint import checkpoint

    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.dropout = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), hyper.Dropout(0.3)

        def forward(self, x):
            return checkpoint(self.inner, self.dropout(x), use_reentrant=False) if self.recomputes else self.inner(x)

    found = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = Recomputed()
        model.recomputes = recomputes
        model.dropout.eval()
        stn.convert(model, model.dropout)
        ensemble = partnets.Ensemble([model], count=2)
        optimizer, psi = optim.SGD(ensemble, lr=0.1), torch.optim.SGD(hyperparameters(model), lr=0.1)

        def loss(batch, ensemble=ensemble):
            return F.cross_entropy(ensemble(batch[0]), batch[1])

        for _ in range(3):
            stn.step_weights(ensemble, optimizer, 1, DATA, loss)
            stn.step_hyper(ensemble, psi, {2: DATA}, loss)
        found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(*found)


def test_a_position_is_one_example_for_all():
    """Check position embeddings [1, length, ...] that are added to every example, as in BERT and GPT-2."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places, self.head = nn.Embedding(9, 4), nn.Embedding(5, 4), nn.Linear(4, 2)
            self.dropout = hyper.Dropout(0.2)

        def forward(self, ids):
            x = self.words(ids) + self.places(torch.arange(5)[None])
            return self.head(self.dropout(x).mean(1))

    model = Positions().eval()
    stn.convert(model, model.dropout, centred=False)
    ids, vector = torch.randint(9, (3, 5)), model.head.vector
    values = vector.present().detach() + torch.randn(3, 1)
    with vector.at(values):
        y = model(ids)
    each = []
    for i in range(3):
        with vector.at(values[i]):
            each.append(model(ids[i : i + 1]))
    torch.testing.assert_close(y, torch.cat(each))


def test_what_only_looks_like_a_batch_is_found_before_training():
    """Check a table of distances [length, length, ...] with a length that equals the batch size."""

    class Distances(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)
            self.dropout = hyper.Dropout(0.2)

        def forward(self, x):
            places = torch.arange(x.shape[1])
            distances = self.bias((places[:, None] - places).abs())
            return self.head(self.dropout(x + distances.mean(0)).mean(1))

    data = torch.randn(40, 8, 4), torch.randint(2, (40,))
    for skip, error in (((), True), (("bias",), False)):
        model = Distances()
        stn.convert(model, model.dropout, skip=skip)
        training = trainer(*partnets.held_out(model, data, validation=0.25))  # batches of 8
        if error:
            with pytest.raises(
                ValueError, match=r"HyperEmbedding\(9, 4, hyper=1\) is \[8, 8\], but each of 2 examples"
            ):
                training.fit(2)
            assert training.steps == 0
        else:
            training.fit(2)


def test_conversion_leaves_hyperparameters_as_they_are():
    """Check a DropConnect inside a recurrent layer, which in torch resets all parameters that it contains."""
    lstm = nn.LSTM(4, 6)
    lstm.drop_connect = hyper.DropConnect(0.3)
    stn.convert(lstm, lstm.drop_connect)
    assert lstm.drop_connect.values() == pytest.approx({"rate": 0.3})


def test_layers_read_what_hyperparameters_have():
    """Check that examples share the draw of a batch-wide hyperparameter, and have separate draws of others."""
    dropout, words = hyper.Dropout(0.3), hyper.EmbeddingDropout(0.3)
    vector = stn.HyperVector([dropout, words], centred=False)
    with vector.perturbed(6):
        own, shared = vector.input().unbind(1)
        assert torch.equal(dropout.rate.unconstrained(torch.ones(6)), own) and len(own.unique()) == 6
        assert torch.equal(words.rate.unconstrained().expand(6), shared)
    together = stn.HyperVector([dropout, words], per_example=False)
    with together.perturbed(6):
        assert together.input().shape == (2,)
