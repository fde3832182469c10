"""Training steps and trainer of self-tuning networks."""

import copy
import math

import ownership
import pytest
import torch
import torch.nn.functional as F
from pairwise import pairwise
from self_tuning import DATA, PROPORTIONS, X, Y, converted, held_out, partitioned, shifted, trainer
from torch import nn

import partnets
from partnets import hyper, optim, stn
from partnets.hyper import hyperparameters
from partnets.stn.converting import vector_of

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


def response_names(model):
    return {name for name, _ in model.named_parameters() if "hyper_" in name or name.endswith("_scale")}


def step(model, *, k=1, batch=(X[:6], Y[:6]), lr=0.5):
    """Take a step of the weights from a fixed random state."""
    torch.manual_seed(3)
    optimizer = optim.SGD(model, lr=lr)
    stn.step_weights(model, optimizer, k, batch, lambda batch: F.cross_entropy(model(batch[0]), batch[1]))


def copied(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("options", [{"centred": False}, {}, {"skip": ["6"]}])
def test_a_step_of_the_weights_is_algorithm_1(options):
    """Check that all but the response learns at the present hyperparameters if these are centred."""
    network = shifted(**options)
    expected, before = copy.deepcopy(network), copied(network)
    vector, names = vector_of(expected), response_names(expected)
    psi, centred = set(hyperparameters(expected)), vector_of(expected).centred

    def loss_of(module):
        with hyper.penalties() as found:
            loss = F.cross_entropy(module(X[:6]), Y[:6])
        return loss + sum(penalty.mean() for penalty in found)

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

    step(partnets.Ensemble([network], num_partitions=2))
    for name, parameter in expected.named_parameters():
        now = network.get_parameter(name)
        if parameter in psi:
            assert torch.equal(now, before[name]) and now.grad is None
            continue
        grad = elementary[name] if centred and name not in names else parameter.grad
        torch.testing.assert_close(now, before[name] - 0.5 * grad)


def test_optimizer_hooks_see_the_gradient_of_one_partition():
    (model, _), seen = partitioned(), []
    optimizer = optim.SGD(model)
    optimizer.register_step_pre_hook(lambda *_: seen.append(model[1].weight.grad != 0))
    stn.step_weights(model, optimizer, 2, X[:6], lambda x: F.cross_entropy(model(x), Y[:6]))
    assert torch.equal(seen[0], partnets.partitions(model)["1.weight"].mask(2))


@pytest.mark.parametrize(("per_example", "last"), [(True, nn.Softmax(1)), (False, nn.Identity())])
def test_a_linearised_response_learns_by_outputs_that_are_linear_in_it(per_example, last):
    network = shifted(linearised=True, per_example=per_example).append(last).double().eval()
    expected, before = copy.deepcopy(network), copied(network)
    x, y = X[:6].double(), Y[:6]
    vector = vector_of(expected)
    torch.manual_seed(3)
    noise = torch.randn((6, vector.size) if per_example else vector.size, dtype=torch.float64)
    perturbation = (vector.scale() * noise).detach()

    def response(t):
        with vector.at(vector.present() + t * perturbation):
            return expected(x)

    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    F.cross_entropy(sum(torch.func.jvp(response, (zero,), (one,))), y).backward()
    step(partnets.Ensemble([network], num_partitions=2), batch=(x, y))
    names = [name for name in response_names(network) if not name.endswith("scale_raw")]
    assert len(names) == 12
    for name in names:
        moved = before[name] - 0.5 * expected.get_parameter(name).grad
        torch.testing.assert_close(network.get_parameter(name), moved)


def test_penalties_of_a_linearised_response_are_exact():
    """Check that the linearised loss of a linear model with quadratic penalties is exact."""
    found = []
    for linearised in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(4, 2)
        decay = hyper.WeightDecay(layer, 0.3)
        penalty = hyper.ActivationPenalty(0.5, range=hyper.logarithmic(1e-3, 1.0))
        network = stn.convert(nn.Sequential(layer, decay, penalty), [decay, penalty], linearised=linearised)
        nn.init.normal_(network[0].weight_scale)
        step(partnets.Ensemble([network], num_partitions=2), batch=DATA)
        found.append(dict(network.named_parameters()))
    for name, parameter in found[0].items():
        torch.testing.assert_close(found[1][name], parameter)


def test_partitioned_layers_that_do_not_respond_are_linearised_too():
    """Check that a linearised step of partition 1 is that of the dense subnetwork 1, for the entries that it owns."""
    model = partnets.partition(shifted(linearised=True, skip=["6"]).double().eval(), PROPORTIONS, defaults="stored")
    dense = partnets.merge(model, 1)
    for each in (model, partnets.Ensemble([dense], num_partitions=3)):
        step(each, batch=(X[:6].double(), Y[:6]))
    stepped = dict(partnets.merge(model, 1).named_parameters())
    partitions = partnets.partitions(model)
    for name, parameter in dense.named_parameters():
        mine = partitions[name].mask(1) if name in partitions else ...
        torch.testing.assert_close(stepped[name][mine], parameter[mine], rtol=1e-10, atol=1e-10)


def test_a_step_of_the_hyperparameters_is_algorithm_1():
    network = shifted()
    model, expected, before = partnets.Ensemble([network], num_partitions=2), copy.deepcopy(network), copied(network)
    optimizer = torch.optim.SGD(hyperparameters(model), lr=0.5)
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
    psi = set(hyperparameters(expected))
    for name, parameter in expected.named_parameters():
        moved = before[name] - 0.5 * parameter.grad if parameter in psi else before[name]
        torch.testing.assert_close(network.get_parameter(name), moved)


@pytest.mark.cases(usual=1)
@each_made
def test_training_changes_all_learned_parameters_and_records_them(make):
    model, chunks = make()
    before = copied(model)
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
    first = trainer(make()[0], chunks)
    first.fit(stop)
    first.save(tmp_path / "checkpoint.pt")
    third, _ = make()
    resumed = trainer(third, chunks)
    resumed.load(tmp_path / "checkpoint.pt")
    resumed.fit(8 - stop)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, third.get_parameter(name)), name


@pytest.mark.full
@pytest.mark.parametrize("centred", [False, True])
def test_later_chunks_reach_no_earlier_partition(centred):
    """Check that, with fixed hyperparameters, D_2 and D_3 do not affect partition 1, nor D_3 partition 2."""
    found = {}
    for changed in (None, 2, 3):
        model, chunks = partitioned(centred=centred)
        data = X.clone()
        data[chunks.indices(changed) if changed else []] = 100.0
        chunks = partnets.chunk((data, Y), PROPORTIONS)
        rate = torch.optim.SGD([p for p in hyperparameters(model) if p.requires_grad], lr=0.0)
        training = trainer(model, chunks, hyper_optimizer=rate, lml_every=None, other_chunks=True)
        training.fit(30)
        found[changed] = model, training.optimizer.state
    for changed in (2, 3):
        pair = found[None], found[changed]
        assert [ownership.same(pair, [k]) for k in (1, 2, 3)] == [k < changed for k in (1, 2, 3)]


def test_label_smoothing_applies_only_to_the_training_loss():
    smoothing = hyper.LabelSmoothing(0.3)
    model = stn.convert(nn.Sequential(nn.Linear(4, 2), smoothing), smoothing)
    training = trainer(*partnets.held_out(model, DATA, validation=0.25), loss=smoothing)
    assert training.hyper_loss is F.cross_entropy
    training.fit(6)
    assert smoothing.values()["smoothing"] != pytest.approx(0.3)


@pytest.mark.full
def test_training_on_noisy_labels_increases_weight_decay_and_lml():
    """Flip 40 % of the labels, so that the network must not fit them and the decay has to grow."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(240, 30, generator=generator)
    y = (x[:, 0] > 0).long()
    noisy = torch.where(torch.rand(240, generator=generator) < 0.4, 1 - y, y)
    layer = nn.Linear(30, 2)
    decay = hyper.WeightDecay(layer, 1e-4, range=hyper.logarithmic(1e-6, 1.0))
    model = stn.convert(nn.Sequential(layer, decay), decay, scale=0.5)
    ensemble, chunks = partnets.held_out(model, (x, noisy), validation=0.5)
    rates = {"hyper_optimizer": torch.optim.Adam(hyperparameters(ensemble), lr=3e-2)}
    training = trainer(ensemble, chunks, batch_size=120, hyper_every=1, hyper_after=100, lml_every=100, **rates)
    history = training.fit(600)
    assert decay.values()["decay"] > 1e-2
    assert history.lml["lml"][-1] > history.lml["lml"][0]


def test_a_network_in_evaluation_mode_trains():
    network, zeros = converted().eval(), []
    network[5].register_forward_hook(lambda module, _, y: zeros.append(bool((y == 0).any()) and module.training))
    trainer(*partnets.held_out(network, DATA, validation=0.25), lml_every=None, hyper_every=9).fit(3)
    assert any(zeros)


@pytest.mark.parametrize("responds, lml", [(True, False), (False, False), (False, True)])
def test_a_batch_counts_once_in_running_statistics_at_the_present_hyperparameters(responds, lml):
    noise = hyper.InputNoise(1.0)
    network = nn.Sequential(noise, nn.BatchNorm1d(4), nn.Linear(4, 2))
    stn.convert(network, noise, scale=3.0, learn_scale=False, skip=[] if responds else ["1"])
    expected = copy.deepcopy(network[1])
    model = (
        partnets.partition(network, (0.5, 0.5), defaults="stored")
        if lml
        else partnets.Ensemble([network], num_partitions=2)
    )
    model.train()
    before = copy.deepcopy(network[1])
    step(model, batch=(X[:8], Y[:8]), lr=0.1)
    torch.manual_seed(3)
    vector = vector_of(network)
    with torch.no_grad(), vector.at(vector.present()):
        expected(noise(X[:8]))
    with partnets.subnetwork(model, 1):
        assert network[1].num_batches_tracked == 1
        torch.testing.assert_close(network[1].running_mean, expected.running_mean)
        torch.testing.assert_close(network[1].running_var, expected.running_var)
    if lml:
        assert torch.equal(network[1].running_mean, before.running_mean)  # that of subnetwork 2
        assert not torch.equal(network[1].bias_rows[0], before.bias_rows[0])  # which learned


def test_names_in_the_history_are_accepted_by_freeze():
    dropout, noise = hyper.Dropout(0.3), hyper.InTraining(hyper.InputNoise(0.1))
    network = stn.convert(nn.Sequential(noise, nn.Linear(4, 8), dropout, nn.Linear(8, 2)), [dropout, noise])
    made = trainer(*partnets.held_out(network, DATA, validation=0.25))
    names = [name for name in made.fit(2).values if not name.endswith("scale")]
    assert names == ["networks.0.2.rate", "networks.0.0.module.std"]
    assert {f"{name}, scale" for name in names} <= set(made.history.values)
    frozen = stn.freeze(network, dict(zip(names, (0.2, 0.05), strict=True)))
    assert frozen[2].p == pytest.approx(0.2)


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


@pytest.mark.parametrize("layer, shape", [(nn.LSTM(4, 6, 2), (3, 5, 4)), (nn.Linear(4, 6), (3, 4))])
def test_drop_connect(layer, shape):
    x, layer = torch.randn(shape), copy.deepcopy(layer)
    layer.drop_connect = hyper.DropConnect(0.5)
    dim = x.dim() - 2
    model = stn.convert(nn.Sequential(layer), layer.drop_connect, batch_dim=dim)
    assert layer.drop_connect.values() == pytest.approx({"rate": 0.5})  # though torch's LSTM resets its submodules
    first, second = (model(x)[0] for _ in range(2))
    assert not torch.equal(first, second)
    model.eval()
    assert torch.equal(model(x)[0], model(x)[0])
    model.train()
    with vector_of(model).perturbed(x.shape[dim]):
        first, second = (model(x)[0] for _ in range(2))
    assert not torch.equal(first, second)
    frozen = stn.freeze(model)
    torch.testing.assert_close(frozen(x)[0], model.eval()(x)[0])
    assert not hasattr(frozen[0], "drop_connect")


@pytest.mark.parametrize("scale", [0.7, 200.0])
def test_the_perturbation_has_its_scale_and_its_entropy(scale):
    vector = vector_of(converted(scale=scale))
    expected = vector.size * (math.log(scale) + 0.5 * math.log(2 * math.pi * math.e))
    assert vector.entropy().item() == pytest.approx(expected, rel=1e-6)
    with torch.no_grad():
        draws = []
        for _ in range(3):
            with vector.perturbed(4000):
                draws.append(vector.input())
    assert torch.cat(draws).std(0).tolist() == pytest.approx([scale] * 3, rel=0.05)


def test_examples_share_the_draw_of_a_hyperparameter_of_the_batch():
    dropout, words = hyper.Dropout(0.3), hyper.EmbeddingDropout(0.3)
    vector = stn.HyperVector([dropout, words], centred=False)
    with vector.perturbed(6):
        own, shared = vector.input().unbind(1)
        assert torch.equal(dropout.rate.unconstrained(torch.ones(6)), own) and len(own.unique()) == 6
        assert torch.equal(words.rate.unconstrained().expand(6), shared)
    together = stn.HyperVector([dropout, words], per_example=False)
    with together.perturbed(6):
        assert together.input().shape == (2,)


def test_recomputed_activations_are_those_of_the_same_hyperparameters():
    from torch.utils.checkpoint import checkpoint

    class Recomputed(nn.Module):
        def __init__(self, recomputes):
            super().__init__()
            self.inner, self.dropout = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), hyper.Dropout(0.3)
            self.recomputes = recomputes

        def forward(self, x):
            return checkpoint(self.inner, self.dropout(x), use_reentrant=False) if self.recomputes else self.inner(x)

    found = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = Recomputed(recomputes)
        model.dropout.eval()
        stn.convert(model, model.dropout)
        ensemble = partnets.Ensemble([model], num_partitions=2)
        optimizer, psi = optim.SGD(ensemble, lr=0.1), torch.optim.SGD(hyperparameters(model), lr=0.1)

        def loss(batch, ensemble=ensemble):
            return F.cross_entropy(ensemble(batch[0]), batch[1])

        for _ in range(3):
            stn.step_weights(ensemble, optimizer, 1, DATA, loss)
            stn.step_hyper(ensemble, psi, {2: DATA}, loss)
        found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(*found)
