"""A client's round and the server's aggregation: Eq. 25 and 26, and the values that must not change."""

import copy
import dataclasses
import functools
import math
import random
from collections import Counter

import ownership
import pytest
import torch
import torch.nn.functional as F
from clients import (
    CHUNKS,
    PLAIN,
    Count,
    Gains,
    client,
    load_data,
    make_model,
    make_noisy,
    make_undivided,
    run,
    same,
    server,
    state,
)
from small_network import Drift

import partnets
from partnets import federated, hyper, optim
from partnets.federated import Client, Privacy, Server
from partnets.federated.round import shown
from partnets.federated.vectors import Vectors
from partnets.utils import sealed


@pytest.mark.full
@pytest.mark.parametrize("number", [0, 1, 2])
def test_each_partition_learns_separately_from_the_servers_values(number):
    """Compare with an explicit Eq. 25: SGD on w_j through subnetwork j, each from the server's values."""
    one = client(number, optimizer=lambda model: optim.SGD(model, lr=0.1), epochs=2)
    values = {name: vector + 0.01 for name, vector in one.vectors.read().items()}
    update = one.train(values, round=3)
    assert list(update.values) == one.vectors.sent_by(one.chunk)[0]

    for k in range(one.chunk, 4):
        model, psi = make_model()
        vectors = Vectors(model, psi)
        # Draw the same numbers: the other partitions' epochs come first.
        again = client(number, optimizer=lambda model: optim.SGD(model, lr=0.1), epochs=2)
        again.train(values, round=3)
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(partnets.utils.seeds.derived(0, f"client {number} in round 3"))
        x, y = load_data(number)
        orders = [torch.randperm(len(x), generator=generator) for _ in range(2 * (k - one.chunk + 1))][-2:]
        vectors.write(values)
        for order in orders:
            for batch in order.split(8):
                model.zero_grad()
                with partnets.subnetwork(model, active=k, update=k):
                    F.cross_entropy(model(x[batch]), y[batch]).backward()
                (name,) = vectors.of_partition(k)
                step = vectors.read([name])[name] - 0.1 * vectors.read_gradients([name])[name]
                vectors.write({name: step})
        expected = vectors.read(vectors.of_partition(k))
        torch.testing.assert_close({name: update.values[name] for name in expected}, expected, rtol=1e-5, atol=1e-6)


def tokens():
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(7, (9, 5), generator=generator)
    y = torch.randint(4, (9, 5), generator=generator)
    y[torch.rand(9, 5, generator=generator) < 0.4] = -100
    y[:, 0] = x[:, 0] % 4
    return x, y


def language():
    torch.manual_seed(0)
    layers = torch.nn.Embedding(7, 6), Gains(), torch.nn.Linear(6, 4)
    return partnets.partition(torch.nn.Sequential(*layers), (0.5, 0.3, 0.2), seed=0), layers[1]


def classes(model, batch):
    return model(batch[0]), batch[1]


def test_hyper_may_be_an_iterator():
    model, psi = make_model()
    assert federated.Server(model, hyper=iter([psi])).hyper_values() == server().hyper_values() != {}
    assert Client(model, load_data(0), 1, hyper=iter([psi])).hyper == {"0": psi}


def classes_of_tokens(model, batch):
    return model(batch[0]).transpose(1, 2), batch[1]


@pytest.mark.full
@pytest.mark.parametrize(
    ("make", "data", "forward", "batch_size"),
    [(make_model, load_data(2), classes, 8), *((language, tokens(), classes_of_tokens, size) for size in (9, 4, 1))],
)
def test_the_gradient_of_psi_is_that_of_the_subnetwork_that_has_not_seen_the_chunk(make, data, forward, batch_size):
    """Check Eq. 26: the gradient of the mean loss over all examples or tokens, for any batches."""
    model, psi = make()
    one = Client(model, data, 3, hyper=psi, batch_size=batch_size, forward=forward)
    update = one.train(one.vectors.read(), round=1)
    model, psi = make()
    with partnets.subnetwork(model, active=2):
        output, y = forward(model, data)
        losses = F.cross_entropy(output, y, reduction="none")
        (expected,) = torch.autograd.grad(losses.sum() / (y != -100).sum(), list(psi.parameters()))
    torch.testing.assert_close(update.gradients["hyper.float32"], expected, rtol=1e-5, atol=1e-7)
    assert update.hyper_loss == pytest.approx(losses.sum().item(), rel=1e-6)


def test_a_client_of_the_first_chunk_sends_no_gradient():
    first = client(0).train(client(0).vectors.read(), round=1)
    assert not first.gradients and first.hyper_loss is None and first.losses.keys() == {1, 2, 3}


def test_modules_that_act_only_in_training_are_off_where_psi_learns():
    def make():
        model, psi = make_model()
        return torch.nn.Sequential(hyper.Mixup(1.0), model), psi

    one = client(2, make=make)
    update = one.train(one.vectors.read(), round=1)
    (model, psi), batch = make(), load_data(2)
    optimizer = torch.optim.SGD(psi.parameters())
    loss = partnets.step_hyper(model, optimizer, {3: batch}, lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
    assert update.hyper_loss == pytest.approx(len(batch[0]) * loss.item(), rel=1e-6)


def test_psi_may_have_a_batch_of_its_own():
    one = client(1, hyper_batch_size=5)
    found = [one.train(one.vectors.read(), round=number).hyper_loss for number in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


@pytest.mark.full
def test_a_round_that_is_repeated_gives_the_same_bits_and_leaves_the_random_states():
    one, other = client(1, make=make_noisy), client(1, make=make_noisy)
    values = one.vectors.read()
    torch.manual_seed(5)
    random.seed(5)
    before = torch.get_rng_state(), random.getstate()
    first = one.train(values, round=2)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    one.train(values, round=3)  # must not leave any state
    torch.rand(3)
    again, elsewhere = one.train(values, round=2), other.train(values, round=2)
    for update in (again, elsewhere):
        assert same(first.values, update.values) and same(first.gradients, update.gradients)


@pytest.mark.full
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_the_mean_change_of_the_contributors_is_the_gradient_of_a_step(weighting):
    own = server(weighting=weighting, **PLAIN)
    values = own.values()
    updates = [client(number).train(values, round=1) for number in range(4)]
    found = own.step(updates)
    assert found.contributors == {1: 2, 2: 3, 3: 4} and not found.refused
    for k, givers in ((1, (0, 3)), (2, (0, 1, 3)), (3, (0, 1, 2, 3))):
        weights = [updates[i].examples if weighting == "examples" else 1 for i in givers]
        name = f"w{k}.float32"
        mean = sum(w * updates[i].values[name].double() for w, i in zip(weights, givers, strict=True)) / sum(weights)
        torch.testing.assert_close(own.values()[name], mean.float(), rtol=1e-5, atol=1e-6)
    weights = [updates[i].examples if weighting == "examples" else 1 for i in (1, 2)]
    gradient = sum(w * updates[i].gradients["hyper.float32"] for w, i in zip(weights, (1, 2), strict=True)) / sum(
        weights
    )
    torch.testing.assert_close(own.values()["hyper.float32"], values["hyper.float32"] - gradient)
    assert found.examples == 25 + 30
    assert found.lml == pytest.approx(-updates[1].hyper_loss - updates[2].hyper_loss)


def test_one_partition_is_plain_federated_averaging():
    """Compare with a short implementation: local SGD, mean by examples, Adam on the change (Reddi et al. 2020)."""
    own = server(make_undivided, optimizer=None)
    clients = [client(number, chunk=1, make=make_undivided) for number in range(4)]
    run(own, clients, 3)

    network = make_undivided()[0].networks[0]
    adam = torch.optim.Adam(network.parameters(), lr=1e-3)
    for number in range(1, 4):
        start = {name: one.detach().clone() for name, one in network.named_parameters()}
        mean = {name: torch.zeros_like(one, dtype=torch.float64) for name, one in start.items()}
        for i in range(4):
            network.load_state_dict(start)
            sgd, (x, y) = torch.optim.SGD(network.parameters(), lr=0.05), load_data(i)
            seed = partnets.utils.seeds.derived(0, f"client {i} in round {number}")
            for batch in torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).split(8):
                sgd.zero_grad()
                F.cross_entropy(network(x[batch]), y[batch]).backward()
                sgd.step()
            for name, one in network.named_parameters():
                mean[name] += one.detach().double() * len(x) / sum(len(load_data(j)[0]) for j in range(4))
        network.load_state_dict(start)
        for name, one in network.named_parameters():
            one.grad = (start[name].double() - mean[name]).float()
        adam.step()
    expected = torch.cat([one.detach().flatten() for one in network.parameters()])
    torch.testing.assert_close(own.values()["w1.float32"], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("k", [2, 3])
def test_a_later_chunks_examples_reach_no_earlier_partition(k):
    """Check that w_1..w_{k-1} and their moments do not depend on the data of clients of chunk k, with ψ fixed."""
    pair = []
    for flip in (False, True):
        own = Server(make_model()[0])
        clients = []
        for number, chunk in enumerate(CHUNKS):
            x, y = load_data(number)
            if flip and chunk == k:
                x, y = 3 - x, 2 - y
            clients.append(Client(make_model()[0], (x, y), chunk, number, batch_size=8))
        run(own, clients, 3)
        pair.append((own.model, own.optimizer.state))
    assert [ownership.same(pair, [j]) for j in (1, 2, 3)] == [j < k for j in (1, 2, 3)]


def spoil_values(change):
    """Return a fault in the first of an update's vectors; without a result it is removed."""

    def spoil(update):
        name, *_ = update.values
        found = change(update.values[name].clone())
        values = {**update.values, name: found}
        return {"values": {name: value for name, value in values.items() if value is not None}}

    return spoil


LENGTH_1 = client(0).vectors.lengths["w1.float32"]
# The fields of an update that an honest client would not send.
FAULTS = {
    "NaN": spoil_values(lambda vector: vector.index_fill_(0, torch.tensor([2]), math.nan)),
    "infinite": spoil_values(lambda vector: vector / 0.0),
    "huge": spoil_values(lambda vector: vector + 1e30),
    "above max_norm": spoil_values(lambda vector: vector + 1e6),
    "wrong shape": spoil_values(lambda vector: vector[:-1]),
    "wrong dtype": spoil_values(torch.Tensor.double),
    "no tensor": spoil_values(torch.Tensor.tolist),
    "a partition less": spoil_values(lambda vector: None),
    "an earlier partition": lambda update: {"values": {**update.values, "w1.float32": torch.zeros(LENGTH_1)}},
    "another name": lambda update: {"values": {**update.values, "backdoor": torch.zeros(3)}},
    "another client": lambda update: {"client": 0},
    "another chunk": lambda update: {"chunk": 5 - update.chunk},
    "an earlier chunk": lambda update: {"chunk": 1},
    "no chunk": lambda update: {"chunk": 4},
    "no gradient of ψ": lambda update: {"gradients": {}},
    "a gradient of NaN": lambda update: {"gradients": {"hyper.float32": torch.full((6,), math.nan)}},
    "a gradient above hyper_max_norm": lambda update: {"gradients": {"hyper.float32": torch.full((6,), 1e6)}},
    "an older round": lambda update: {"round": update.round - 1},
    "no examples": lambda update: {"examples": 0},
    "examples of a fraction": lambda update: {"examples": 2.5},
    "a loss of NaN": lambda update: {"hyper_loss": math.nan},
    "a loss that overflows": lambda update: {"losses": {3: -1.7e308}},
    "losses of other partitions": lambda update: {"losses": {1: 1.0}},
    "another model": lambda update: {"fingerprint": "0" * 32},
    "twice": lambda update: {},
}


@pytest.fixture(scope="module")
def second_round():
    """Return a server after one round, and the four clients' updates of the second."""
    own = server(max_norm=1e5, hyper_max_norm=1e5)
    run(own, [client(i) for i in range(4)], 1)
    return own, [client(i).train(own.values(), 2) for i in range(4)]


@pytest.mark.cases(usual=12)
@pytest.mark.parametrize("what", FAULTS)
@pytest.mark.parametrize("number", [1, 2])
def test_an_update_that_is_refused_has_no_effect(what, number, second_round):
    """Check this to the bit, for any order of the other updates."""
    own, updates = second_round
    honest, hurt = copy.deepcopy(own), copy.deepcopy(own)
    honest.step(update for update in updates if update.client != number)
    sent = [*enumerate(updates)]
    sent[number] = number, dataclasses.replace(updates[number], **FAULTS[what](updates[number]))
    sent += sent[number : number + 1] if what == "twice" else []
    senders, spoiled = zip(*reversed(sent), strict=True)
    found = hurt.step(spoiled, senders)
    assert found.refused.keys() == {number} and isinstance(found.refused[number], str)
    assert same(state(honest), state(hurt)) and not same(state(own), state(hurt))


def test_a_client_number_keeps_its_chunk_from_any_sender(second_round):
    own, updates = copy.deepcopy(second_round[0]), second_round[1]
    moved = client(1, chunk=1).train(own.values(), 2)
    found = own.step([updates[2], moved], senders=[10, 11])  # node 10 is client 2 restarted
    assert found.refused == {11: "client 1 is of chunk 1 now but was of another chunk"}
    assert found.contributors == {1: 0, 2: 0, 3: 1}


def test_a_client_number_with_two_chunks_in_one_round_is_refused():
    own = server()
    updates = [client(0, chunk).train(own.values(), 1) for chunk in (1, 2)]
    found = own.step([*updates, client(1).train(own.values(), 1)], senders=[10, 11, 12])
    assert found.refused == dict.fromkeys((10, 11), "client 0 is of several chunks in this round")
    assert own.pinned == {12: (1, 2)}


def test_a_partition_without_contributors_keeps_weights_and_moments(second_round):
    own, (_, _, update, _) = copy.deepcopy(second_round[0]), second_round[1]
    before = state(own)
    assert own.step([]).contributors == {1: 0, 2: 0, 3: 0} and own.history[-1].lml is None and own.rounds == 2
    assert same(before, state(own))
    values = own.values()
    found = own.step([dataclasses.replace(update, round=3)])
    changed = [name for name, vector in own.values().items() if not torch.equal(vector, values[name])]
    assert changed == ["w3.float32", "hyper.float32"]
    change = (update.values["w3.float32"].double() - values["w3.float32"].double()).norm()
    assert found.norms == {2: pytest.approx(change.item())}


def test_clients_that_share_the_servers_model_raise():
    own = server(max_norm=1e-9)
    before, moments = own.values(), state(own)
    same_model = Client(own.model, load_data(0), 1, hyper=own.model[0], batch_size=8)
    with pytest.raises(RuntimeError, match="a client computes with the same module"):
        own.step(same_model.train(own.values(), 1) for _ in range(1))
    assert same(before, own.values()) and same(moments, state(own)) and own.rounds == 0


def counting():
    torch.manual_seed(0)
    model = torch.nn.Sequential(psi := Gains(), Count(), torch.nn.Linear(6, 3))
    return partnets.partition(model, (0.5, 0.3, 0.2), seed=0), psi


def test_module_counters_restart_for_each_partition_and_round():
    """Compare with a separate process for each partition and round: earlier clients leave no state."""
    base, fresh = client(0, make=counting, audit=False), client(2, make=counting, audit=False)
    values = base.vectors.read()
    for number in (1, 0, 3):
        base.with_data(load_data(number), CHUNKS[number], number).train(values, round=1)
    turn, own = base.with_data(load_data(2), 3, 2).train(values, round=2), fresh.train(values, round=2)
    assert same(turn.values, own.values) and same(turn.gradients, own.gradients)


def test_users_hooks_on_parameters_change_nothing():
    """Check that gradients stay masked after a client has restored the hooks that it was constructed with."""
    model, psi = make_model()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad)
    plain, hooked = client(1), Client(model, load_data(1), 2, 1, hyper=psi, batch_size=8)
    values = {name: vector + 0.1 for name, vector in plain.vectors.read().items()}
    assert same(plain.train(values, 1).values, hooked.train(values, 1).values)


def test_freezing_a_parameter_after_construction_raises():
    one, own = client(1), server()
    values = own.values()
    for each in (one, own):
        each.model[1].requires_grad_(False)
    for act in (lambda: one.train(values, 1), own.values):
        with pytest.raises(RuntimeError, match="construct client and server again"):
            act()


def test_loading_other_optimiser_settings_warns(tmp_path):
    own = server()
    run(own, [client(i) for i in range(4)], 1)
    own.save(tmp_path / "server.pt")
    other = server(optimizer=functools.partial(optim.Adam, lr=0.5))
    with pytest.warns(UserWarning, match=r"optimizer\.param_groups\[0\]\.lr is 0\.001, not 0\.5"):
        other.load(tmp_path / "server.pt")
    assert other.history == own.history


@pytest.mark.full
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_saved_server_goes_on_with_the_same_bits(tmp_path, after):
    whole, part = server(), server()
    clients = [client(i) for i in range(4)]
    run(whole, clients, after + 2)
    if after:
        run(part, clients, after)
    part.save(tmp_path / "server.pt")
    resumed = server()
    resumed.load(tmp_path / "server.pt")
    assert resumed.rounds == after and resumed.pinned == part.pinned
    run(resumed, clients, 2)
    assert same(state(whole), state(resumed))


@pytest.mark.full
def test_a_file_of_another_server_changes_nothing(tmp_path):
    def two_groups(parameters):
        return torch.optim.Adam([{"params": [*parameters]}, {"params": []}])

    def private(z):
        return server(weighting="uniform", privacy=Privacy(1.0, z))

    path, own, own_private = tmp_path / "server.pt", server(), private(1.0)
    other = server(optimizer=PLAIN["optimizer"])
    before = other.values()
    for saved in (own, own_private):
        run(saved, [client(i) for i in range(4)], 1)
    for saved, wrong, message in (
        (own_private, private(2.0), "another privacy"),
        (own, other, "another optimizer"),
        (own, server(make_undivided), "another fingerprint, hyper, hyper_optimizer"),
        (own, server(weighting="uniform"), "another weighting"),
        (own, server(hyper_optimizer=two_groups), "different number of parameter groups"),
    ):
        saved.save(path)
        present = wrong.values()
        with pytest.raises(ValueError, match=message):
            wrong.load(path)
        assert same(present, wrong.values())
    own_private.save(path)
    private(1.0).load(path)
    own.save(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        other.load(path)
    saved = {"configuration": other._configuration(), "rounds": -1}
    for entries in ({}, saved):
        sealed.save(entries, path)
        with pytest.raises(ValueError, match="is not a file of a federated server"):
            other.load(path)
    assert same(before, other.values()) and other.rounds == 0


def leaking():
    torch.manual_seed(0)
    model = torch.nn.Sequential(psi := hyper.InputMask(6), Drift(6), torch.nn.Linear(6, 3))
    return partnets.partition(model, (0.5, 0.3, 0.2)), psi


def diverging():
    own = server(optimizer=functools.partial(optim.SGD, lr=1e39))
    run(own, [client(0, optimizer=functools.partial(optim.SGD, lr=10.0))], 1)


def unused():
    model, psi = make_model()
    model[0].forward = lambda x: x
    return model, psi


def undivided_with_psi():
    return partnets.Ensemble([torch.nn.Sequential(mask := hyper.InputMask(6), torch.nn.Linear(6, 3))]), mask


def half():
    return partnets.partition(torch.nn.Sequential(torch.nn.Linear(6, 3)).half(), (0.5, 0.5)), None


def trained(number=1, values=lambda values: values, **options):
    one = client(number, **options)
    before = one.vectors.read()
    try:
        one.train(values(before), 1)
    except ValueError:
        assert same(before, one.vectors.read())
        raise


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: client(0, data=(torch.empty(0, 6), torch.empty(0, dtype=torch.long))), ValueError, "no examples"),
        (lambda: client(0, chunk=0), ValueError, r"chunk=0 .* with C=3; pass an int in 1\.\.3"),
        (lambda: client(0, chunk=4), ValueError, "chunk=4"),
        (lambda: client(0, chunk=True), ValueError, "chunk=True"),
        (lambda: client(0, make=undivided_with_psi, chunk=1), ValueError, "hyper=None for federated averaging"),
        (lambda: client(0).train(client(0).vectors.read(), 0), ValueError, "round=0"),
        (lambda: trained(values=lambda values: {n: v * math.nan for n, v in values.items()}), ValueError, "NaN"),
        (lambda: trained(optimizer=lambda m: optim.SGD(m, lr=1e30)), RuntimeError, r"client 1 diverged in round 1: "),
        (lambda: trained(make=unused), RuntimeError, r"gives 0\.gains\.raw no gradient"),
        (lambda: trained(loss=lambda y, t: F.cross_entropy(y, t, reduction="sum")), ValueError, "it is a sum"),
        (lambda: trained(make=leaking), ValueError, r"1\.mean follows the data"),
        (lambda: trained(0, make=leaking), ValueError, r"1\.mean follows the data"),
        (lambda: server(weighting="votes"), ValueError, "weighting='votes'"),
        (lambda: server(max_norm=0), ValueError, "max_norm=0"),
        (lambda: server(half), ValueError, r"parameters are float16.*SGD\(model, lr=1\.0\)"),
        (lambda: server(optimizer=lambda _: optim.Adam(make_model()[0])), ValueError, "optimizer has other parameters"),
        (lambda: server(hyper_optimizer=lambda _: torch.optim.Adam(make_model()[1].parameters())), ValueError,
         "hyper_optimizer has other parameters"),
        (lambda: federated.assign(4, (0.7, 0.2, 0.1)), ValueError,
         r"chunk 3 of 4 clients in proportions \(0.7, 0.2, 0.1\) would have no client"),
        (lambda: Privacy(0.0, 1.0), ValueError, "max_norm=0.0"),
        (lambda: Privacy(math.nan, 1.0), ValueError, "max_norm=nan"),
        (lambda: Privacy(1.0, 1.0, hyper_max_norm=-1.0), ValueError, "hyper_max_norm=-1.0"),
        (lambda: Privacy(1.0, math.inf), ValueError, "noise_multiplier=inf"),
        (lambda: server(privacy=Privacy(1.0, 1.0)), ValueError, "pass weighting='uniform'"),
        (lambda: Privacy(1.0, 1.0).epsilon(client(0).vectors, 1, 1), ValueError, "delta=1"),
        (lambda: Privacy(1.0, 1.0).epsilon(client(0).vectors, 0, 1e-5), ValueError, "rounds=0"),
        (diverging, RuntimeError, r"global model diverged in round 1: .* the server's optimisers"),
    ],
)  # fmt: skip
def test_wrong_use_is_an_error_that_names_the_cure(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_psi_that_reaches_only_the_loss_is_named():
    model, psi = unused()
    one = Client(model, load_data(1), 2, hyper=psi, loss=lambda y, t: F.cross_entropy(y, t) + psi.gains().sum())
    with pytest.raises(ValueError, match=r"0\.gains\.raw reaches the loss, but not"):
        one.train(one.vectors.read(), 1)


@pytest.mark.parametrize(
    "clients, proportions, expected",
    [(100, (0.7, 0.2, 0.1), {1: 70, 2: 20, 3: 10}), (20, (0.9, 0.1), {1: 18, 2: 2}), (3, (1.0,), {1: 3})],
)
def test_chunks_have_clients_in_these_proportions(clients, proportions, expected):
    found = [federated.assign(clients, proportions, seed) for seed in range(3)]
    assert all(Counter(each) == expected for each in found)
    assert len(set(found)) == (3 if len(proportions) > 1 else 1)
    assert found[0] == federated.assign(clients, proportions, 0)


def test_a_long_reason_keeps_its_end():
    reason = "first " + 5000 * "between " + "ValueError: the cause"
    assert shown(reason).startswith("first between") and shown(reason).endswith("... " + shown(reason)[-150:])
    assert shown(reason).endswith("ValueError: the cause") and len(shown(reason)) < 310
