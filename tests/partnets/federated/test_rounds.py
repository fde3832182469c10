"""A client's round and the server's aggregation: Eq. 25 and 26, and the values that must not change."""

import copy
import dataclasses
import math
import random
import threading

import pytest
import torch
import torch.nn.functional as F
from clients import CHUNKS, Gains, client, load_data, make_model, make_noisy, make_undivided, run, same, server, state

import partnets
from partnets import federated, hyper, optim
from partnets.federated import Client, Server
from partnets.federated.round import shown


@pytest.mark.full
@pytest.mark.parametrize("number", [0, 1, 2])
def test_each_partition_learns_alone_from_what_the_server_has_sent(number):
    """Compare with an explicit Eq. 25: SGD on w_j through subnetwork j, each from the server's values."""
    one = client(number, optimizer=lambda model: optim.SGD(model, lr=0.1), epochs=2)
    values = {name: vector + 0.01 for name, vector in one.vectors.read().items()}
    update = one.train(values, round=3)
    assert list(update.values) == one.vectors.from_partition(one.chunk)

    for k in range(one.chunk, 4):
        model, psi = make_model()
        vectors = federated.Vectors(model, psi)
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


@pytest.mark.full
def test_the_gradient_of_psi_is_that_of_the_subnetwork_that_has_not_seen_the_chunk():
    """Check Eq. 26: the gradient of the mean loss over all examples, for any batches."""
    one = client(2)
    values = one.vectors.read()
    update = one.train(values, round=1)
    model, psi = make_model()
    x, y = load_data(2)
    with partnets.subnetwork(model, active=2):
        loss = F.cross_entropy(model(x), y)
        (expected,) = torch.autograd.grad(loss, list(psi.parameters()))
    torch.testing.assert_close(update.gradients["hyper.float32"], expected, rtol=1e-5, atol=1e-7)
    assert update.hyper_loss == pytest.approx(len(x) * loss.item(), rel=1e-6)
    first = client(0).train(values, round=1)
    assert not first.gradients and first.hyper_loss is None and first.losses.keys() == {1, 2, 3}


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
def test_many_clients_take_turns_with_one_model():
    base = client(0)
    values = base.vectors.read()
    for number in (2, 1, 3):
        own = client(number).train(values, round=1)
        turn = base.with_data(load_data(number), CHUNKS[number], number).train(values, round=1)
        assert same(own.values, turn.values) and same(own.gradients, turn.gradients)


@pytest.mark.full
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_the_mean_change_of_the_contributors_is_the_gradient_of_a_step(weighting):
    model, psi = make_model()
    own = Server(model, hyper=psi, weighting=weighting, optimizer=optim.SGD(model, lr=1.0),
                 hyper_optimizer=torch.optim.SGD(psi.parameters(), lr=1.0))  # fmt: skip
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
    outcomes = []
    for flip in (False, True):
        model, _ = make_model()
        own = Server(model)
        clients = []
        for number, chunk in enumerate(CHUNKS):
            x, y = load_data(number)
            if flip and chunk == k:
                x, y = 3 - x, 2 - y
            clients.append(Client(make_model()[0], (x, y), chunk, number, batch_size=8))
        run(own, clients, 3)
        outcomes.append(own)
    first, second = (each.values() for each in outcomes)
    for j in range(1, 4):
        assert torch.equal(first[f"w{j}.float32"], second[f"w{j}.float32"]) == (j < k)
    for j in range(1, k):  # compare their moments
        for moment in ("exp_avg", "exp_avg_sq"):
            first, second = (
                [
                    owner.take(each.optimizer.state[parameter][moment], j)
                    for parameter, owner in each.vectors.owners.items()
                ]
                for each in outcomes
            )
            assert all(map(torch.equal, first, second))


def spoiled(update, what):
    """Return an update that an honest client would not send."""
    name = next(iter(update.values))
    values, number = dict(update.values), update.chunk
    match what:
        case "NaN":
            values[name] = values[name].clone().index_fill_(0, torch.tensor([2]), math.nan)
        case "infinite":
            values[name] = values[name] / 0.0
        case "huge":
            values[name] = values[name] + 1e30
        case "wrong shape":
            values[name] = values[name][:-1]
        case "wrong dtype":
            values[name] = values[name].double()
        case "an earlier partition":
            values["w1.float32"] = torch.zeros(client(0).vectors.lengths["w1.float32"])
        case "a partition less":
            values.pop(name)
        case "no tensor":
            values[name] = values[name].tolist()
        case "a name of its own":
            values["backdoor"] = values[name]
        case "another client":
            return dataclasses.replace(update, client=0)
        case "another chunk":
            return dataclasses.replace(update, chunk=2 if number == 3 else 3)
        case "an earlier chunk":
            return dataclasses.replace(update, chunk=1)
        case "no chunk":
            return dataclasses.replace(update, chunk=4)
        case "no gradient of ψ":
            return dataclasses.replace(update, gradients={})
        case "a gradient of NaN":
            return dataclasses.replace(update, gradients={"hyper.float32": torch.full((6,), math.nan)})
        case "an older round":
            return dataclasses.replace(update, round=update.round - 1)
        case "no examples":
            return dataclasses.replace(update, examples=0)
        case "examples of a fraction":
            return dataclasses.replace(update, examples=2.5)
        case "a loss of NaN":
            return dataclasses.replace(update, hyper_loss=math.nan)
        case "losses of other partitions":
            return dataclasses.replace(update, losses={7: 1.0})
        case "another model":
            return dataclasses.replace(update, fingerprint="0" * 32)
    return dataclasses.replace(update, values=values)


FAULTS = (
    "NaN", "infinite", "huge", "wrong shape", "wrong dtype", "an earlier partition", "a partition less", "no tensor",
    "a name of its own", "another client", "another chunk", "an earlier chunk", "no chunk", "no gradient of ψ",
    "a gradient of NaN", "an older round", "no examples", "examples of a fraction", "a loss of NaN",
    "losses of other partitions", "another model",
)  # fmt: skip


@pytest.fixture(scope="module")
def second_round():
    """Return a server after one round, and the four clients' updates of the second."""
    own = server()
    run(own, [client(i) for i in range(4)], 1)
    return own, [client(i).train(own.values(), 2) for i in range(4)]


@pytest.mark.cases(usual=10)
@pytest.mark.parametrize("what", FAULTS)
@pytest.mark.parametrize("number", [1, 2])
def test_what_is_refused_is_as_if_it_had_not_been_sent(what, number, second_round):
    own, updates = second_round
    honest, hurt = copy.deepcopy(own), copy.deepcopy(own)
    others = [update for update in updates if update.client != number]
    honest.step(others, [update.client for update in others])
    sent = [spoiled(update, what) if update.client == number else update for update in updates]
    found = hurt.step(sent, senders=range(4))
    assert found.refused.keys() == {number} and isinstance(found.refused[number], str)
    assert same(state(honest), state(hurt)) and not same(state(own), state(hurt))


@pytest.mark.full
def test_one_who_sends_twice_is_refused_whole():
    honest, hurt = server(), server()
    updates = [client(i).train(honest.values(), 1) for i in range(4)]
    honest.step(updates[:3])
    found = hurt.step([updates[3], *updates])
    assert found.refused == {3: "it sent several updates in one round"}
    assert same(state(honest), state(hurt))


@pytest.mark.full
def test_several_who_say_that_they_are_one_client_are_told_of():
    """Check that updates with a duplicate client number are reported and do not replace each other."""
    one, other = server(), server()
    updates = [client(i).train(one.values(), 1) for i in range(4)]
    found = one.step([*updates, dataclasses.replace(updates[2], client=0, chunk=3)], senders=[10, 11, 12, 13, 14])
    assert found.doubled == {0: 2} and not found.refused and found.contributors == {1: 2, 2: 3, 3: 5}
    assert other.step(updates).doubled == {}


@pytest.mark.full
def test_a_round_tells_how_much_each_has_changed():
    own = server()
    before = own.values()
    updates = [client(i).train(before, 1) for i in range(4)]
    found = own.step(updates)
    for number, update in enumerate(updates):
        change = torch.cat([update.values[name].double() - before[name].double() for name in update.values])
        assert found.norms[number] == pytest.approx(change.norm().item())


def test_clients_that_compute_with_the_servers_own_model_are_found_out():
    own = server(max_norm=1e-9)
    before, moments = own.values(), state(own)
    same_model = Client(own.model, load_data(0), 1, hyper=own.model[0], batch_size=8)
    with pytest.raises(RuntimeError, match="a client computes with the same module"):
        own.step(same_model.train(own.values(), 1) for _ in range(1))
    assert same(before, own.values()) and same(moments, state(own)) and own.rounds == 0


class Count(torch.nn.Module):
    """A module that counts its examples in a buffer and in an attribute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("batches", torch.zeros(()))
        self.seen = 0

    def forward(self, x):
        self.batches += 1
        self.seen += len(x)
        return x / (1 + self.batches / 10 + self.seen / 1000)


def counting():
    torch.manual_seed(0)
    model = torch.nn.Sequential(psi := Gains(), Count(), torch.nn.Linear(6, 3))
    return partnets.partition(model, (0.5, 0.3, 0.2), seed=0), psi


def test_what_modules_count_starts_anew_for_each_partition_and_round():
    """Compare with a separate process for each partition and round: earlier clients leave no state."""
    base, fresh = client(0, make=counting, audit=False), client(2, make=counting, audit=False)
    values = base.vectors.read()
    for number in (1, 0, 3):
        base.with_data(load_data(number), CHUNKS[number], number).train(values, round=1)
    turn, own = base.with_data(load_data(2), 3, 2).train(values, round=2), fresh.train(values, round=2)
    assert same(turn.values, own.values) and same(turn.gradients, own.gradients)
    assert base.evaluate(values) == client(0, make=counting, audit=False).evaluate(values)


def test_hooks_of_ones_own_on_parameters_change_nothing():
    """Check that gradients stay masked after a client has restored the hooks that it was constructed with."""
    model, psi = make_model()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad)
    plain, hooked = client(1), Client(model, load_data(1), 2, 1, hyper=psi, batch_size=8)
    values = {name: vector + 0.1 for name, vector in plain.vectors.read().items()}
    assert same(plain.train(values, 1).values, hooked.train(values, 1).values)


def test_what_is_frozen_or_unfrozen_later_is_an_error():
    one, own = client(1), server()
    values = own.values()
    for each in (one, own):
        each.model[1].requires_grad_(False)
    for act in (lambda: one.train(values, 1), own.values):
        with pytest.raises(RuntimeError, match="construct client and server again"):
            act()


def tokens(number):
    generator = torch.Generator().manual_seed(number)
    x = torch.randint(7, (9, 5), generator=generator)
    y = torch.randint(4, (9, 5), generator=generator)
    y[torch.rand(9, 5, generator=generator) < 0.4] = -100
    y[:, 0] = x[:, 0] % 4
    return x, y


@pytest.mark.full
def test_losses_of_tokens_are_those_of_l_ml_whatever_the_batches():
    def make():
        torch.manual_seed(0)
        layers = torch.nn.Embedding(7, 6), Gains(), torch.nn.Linear(6, 4)
        model = torch.nn.Sequential(*layers)
        return partnets.partition(model, (0.5, 0.3, 0.2), seed=0), layers[1]

    def forward(model, batch):
        return model(batch[0]).transpose(1, 2), batch[1]

    def optimizer(model):
        return optim.SGD(model, lr=1e-30)

    found = []
    for batch_size in (9, 4, 1):
        model, psi = make()
        one = Client(model, tokens(2), 2, hyper=psi, batch_size=batch_size, forward=forward, optimizer=optimizer)
        found.append(one.train(one.vectors.read(), 1))
    model, psi = make()
    with partnets.subnetwork(model, active=1):
        output, y = forward(model, tokens(2))
        losses = F.cross_entropy(output, y, reduction="none")
        (expected,) = torch.autograd.grad(losses.sum() / (y != -100).sum(), list(psi.parameters()))
    for update in found:
        assert update.hyper_loss == pytest.approx(losses.sum().item(), rel=1e-5)
        torch.testing.assert_close(update.gradients["hyper.float32"], expected, rtol=1e-4, atol=1e-7)
    told = one.evaluate(one.vectors.read())
    assert told["targets"] == (y != -100).sum() and told["accuracy"] == pytest.approx(
        partnets.accuracy(model, tokens(2), forward=forward)
    )


def test_a_client_is_evaluated_on_the_labels_that_its_loss_counts():
    y = torch.arange(20) % 3
    x = 9 * F.one_hot(y, 3).float()
    y[10:] = 255
    model = partnets.Linear(3, 3, proportions=(0.5, 0.5), defaults="zero")
    torch.nn.init.eye_(model.weight)
    torch.nn.init.zeros_(model.bias)
    one = Client(
        model,
        (x, y),
        1,
        loss=torch.nn.CrossEntropyLoss(ignore_index=255),
        optimizer=lambda model: optim.SGD(model, lr=0.0),
    )
    told = one.evaluate(one.vectors.read())
    assert told["accuracy"] == 1.0 and told["targets"] == 10


def test_a_regression_is_evaluated_by_its_loss():
    model = torch.nn.Sequential(torch.nn.Linear(6, 1), noise := hyper.ObservationNoise())
    partnets.partition(model, (0.5, 0.5))
    data = torch.randn(20, 6), torch.randn(20, 1)
    one = Client(model, data, 2, hyper=noise, loss=hyper.gaussian_nll)
    assert one.evaluate(one.vectors.read()).keys() == {"loss", "targets"}


def test_evaluations_draw_the_same_noise_and_leave_the_random_states():
    torch.manual_seed(0)
    model = partnets.partition(torch.nn.Sequential(mask := Noisy(), torch.nn.Linear(6, 3)), (0.5, 0.5))
    one, before = Client(model, load_data(0), 1), torch.get_rng_state()
    assert one.evaluate(one.vectors.read()) == one.evaluate(one.vectors.read())
    assert torch.equal(before, torch.get_rng_state()) and mask is model[0]


class Noisy(torch.nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


def test_activations_and_buffers_are_part_of_the_fingerprint():
    def fingerprint(change=lambda model: None):
        model, psi = make_model()
        change(model)
        return federated.Vectors(model, psi).fingerprint

    class Told(torch.nn.Module):
        def __init__(self, state):
            super().__init__()
            self.state = state

        def get_extra_state(self):
            return self.state

        def set_extra_state(self, state):
            self.state = state

    assert fingerprint() == fingerprint()
    for change in (
        lambda model: model.__setitem__(3, torch.nn.Tanh()),
        lambda model: model.__setitem__(4, torch.nn.Dropout(0.1)),
        lambda model: model[3].register_buffer("mean", torch.ones(2), persistent=False),
        lambda model: model[3].register_module("told", Told({"x": torch.arange(2000).numpy()})),
    ):
        assert fingerprint(change) != fingerprint()
    assert fingerprint(lambda model: model[3].register_module("told", Told(object()))) == fingerprint(
        lambda model: model[3].register_module("told", Told(object()))
    )


def test_losses_that_overflow_or_are_of_other_partitions_are_refused():
    own = server()
    updates = [client(i).train(own.values(), 1) for i in range(4)]
    updates[1] = dataclasses.replace(updates[1], hyper_loss=1.7e308)
    updates[2] = dataclasses.replace(updates[2], losses={1: 0.5})
    updates[3] = dataclasses.replace(updates[3], losses={3: -1.7e308})
    assert own.step(updates).refused.keys() == {1, 2, 3}


def test_a_server_that_diverges_says_so():
    model, _ = make_model()
    own = Server(model, optimizer=optim.SGD(model, lr=1e39))
    one = Client(make_model()[0], load_data(0), 1, batch_size=8, optimizer=lambda model: optim.SGD(model, lr=10.0))
    with pytest.raises(RuntimeError, match=r"global model diverged in round 1: .* the server's optimisers"):
        run(own, [one], 1)


def test_optimisers_that_cannot_work_are_refused():
    def half():
        model = partnets.partition(torch.nn.Sequential(torch.nn.Linear(6, 3)).half(), (0.5, 0.5))
        return model, None

    with pytest.raises(ValueError, match=r"parameters are float16.*SGD\(model, lr=1\.0\)"):
        server(half)
    model, _ = half()
    assert Server(model, optimizer=optim.SGD(model, lr=1.0)).vectors.count == 2
    model, psi = make_model()
    with pytest.raises(ValueError, match="LBFGS"):
        Server(model, hyper=psi, hyper_optimizer=torch.optim.LBFGS(psi.parameters()))


def test_settings_that_a_file_changes_are_told(tmp_path):
    own = server()
    run(own, [client(i) for i in range(4)], 1)
    own.save(tmp_path / "server.pt")
    model, psi = make_model()
    other = Server(model, hyper=psi, optimizer=optim.Adam(model, lr=0.5))
    with pytest.warns(UserWarning, match=r"optimizer\.param_groups\[0\]\.lr is 0\.001, not 0\.5"):
        other.load(tmp_path / "server.pt")
    assert other.history == own.history
    with pytest.raises(ValueError, match="client 1 with chunk 2, but chunks has another"):
        server(chunks=(1, 3, 3, 1)).load(tmp_path / "server.pt")
    with pytest.raises(ValueError, match="another weighting, privacy"):
        server(weighting="uniform", privacy=federated.Privacy(1.0, 1.0)).load(tmp_path / "server.pt")


@pytest.mark.full
def test_changes_beyond_a_bound_are_refused():
    probe = server()
    updates = [client(i).train(probe.values(), 1) for i in range(4)]
    lengths = {
        update.client: math.sqrt(sum(((v - probe.values()[n]).double() ** 2).sum() for n, v in update.values.items()))
        for update in updates
    }
    bound = sorted(lengths.values())[1] * 1.001
    found = server(max_norm=bound).step(updates)
    assert found.refused.keys() == {number for number, length in lengths.items() if length > bound}
    assert "above the bound of" in next(iter(found.refused.values()))
    assert server(hyper_max_norm=1e-6).step(updates).refused.keys() == {1, 2}


def test_a_server_that_knows_the_chunks_takes_no_others():
    own = server(chunks=CHUNKS)
    updates = [client(i).train(own.values(), 1) for i in range(4)]
    updates.append(client(1, chunk=1, data=load_data(1)).train(own.values(), 1))
    updates.append(client(4, chunk=3, data=load_data(4)).train(own.values(), 1))
    found = own.step(updates, senders=range(10, 16))
    assert found.refused == {
        14: "client 1 with chunk 1 is not among the server's chunks",
        15: "client 4 with chunk 3 is not among the server's chunks",
    }
    with pytest.raises(ValueError, match=r"chunks=\(1, 4\) of a model with C=3"):
        server(chunks=(1, 4))


@pytest.mark.full
def test_the_order_of_updates_makes_no_difference():
    one, other = server(), server()
    updates = [client(i).train(one.values(), 1) for i in range(4)]
    one.step(updates)
    other.step(reversed(updates))
    assert same(state(one), state(other))


def test_a_round_without_updates_changes_nothing_but_its_number():
    own = server()
    before = state(own)
    found = own.step([])
    assert found.number == own.rounds == 1 and found.contributors == {1: 0, 2: 0, 3: 0} and found.lml is None
    assert same(before, state(own))


@pytest.mark.full
def test_a_partition_without_contributors_keeps_weights_and_moments():
    own = server()
    run(own, [client(i) for i in range(4)], 2)
    before = own.values()
    run(own, [client(2)], 1)
    after = own.values()
    assert [torch.equal(before[name], after[name]) for name in before] == [True, True, False, False]


@pytest.mark.full
def test_a_client_without_a_change_is_a_client():
    own = server()
    update = client(2).train(own.values(), 1)
    still = dataclasses.replace(update, values={name: own.values()[name] for name in update.values})
    assert own.step([still]).contributors == {1: 0, 2: 0, 3: 1}


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
    own = server()
    run(own, [client(i) for i in range(4)], 1)
    own.save(tmp_path / "server.pt")
    model, psi = make_model()
    other = Server(model, hyper=psi, optimizer=optim.SGD(model, lr=1.0))
    before = other.values()
    with pytest.raises(ValueError, match="another optimizer"):
        other.load(tmp_path / "server.pt")
    with pytest.raises(ValueError, match="another fingerprint, hyper, hyper_optimizer"):
        server(make_undivided).load(tmp_path / "server.pt")
    data = bytearray((tmp_path / "server.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "server.pt").write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        other.load(tmp_path / "server.pt")
    assert same(before, other.values()) and other.rounds == 0


def test_wrong_use_is_an_error_that_names_the_cure():
    model, psi = make_model()
    with pytest.raises(ValueError, match="client 0 has no examples"):
        Client(model, (torch.empty(0, 6), torch.empty(0, dtype=torch.long)), 1)
    for chunk in (0, 4, True, 1.0):
        with pytest.raises(ValueError, match=r"chunk=.* of a model with C=3; pass an int in 1\.\.3"):
            Client(model, load_data(0), chunk)
    with pytest.raises(ValueError, match="or pass hyper=None for federated averaging"):
        Client(partnets.Ensemble([torch.nn.Sequential(mask := hyper.InputMask(6), torch.nn.Linear(6, 3))]),
               load_data(0), 1, hyper=mask)  # fmt: skip
    one = client(1)
    before = one.vectors.read()
    with pytest.raises(ValueError, match="NaN"):
        one.train({name: vector * math.nan for name, vector in before.items()}, 1)
    assert same(before, one.vectors.read())
    with pytest.raises(ValueError, match="round=0"):
        one.train(before, 0)
    with pytest.raises(ValueError, match="weighting='votes'"):
        Server(model, weighting="votes")
    with pytest.raises(ValueError, match="max_norm=0"):
        Server(model, max_norm=0)
    with pytest.raises(ValueError, match="hyper_optimizer has other parameters"):
        Server(model, hyper=psi, hyper_optimizer=torch.optim.Adam(model[1].parameters()))
    with pytest.raises(ValueError, match="optimizer has other parameters"):
        Server(model, hyper=psi, optimizer=optim.Adam(make_model()[0]))


class Drift(torch.nn.Module):
    """A module with a running mean of the data that it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


def leaking():
    torch.manual_seed(0)
    model = torch.nn.Sequential(psi := hyper.InputMask(6), Drift(), torch.nn.Linear(6, 3))
    return partnets.partition(model, (0.5, 0.3, 0.2)), psi


def test_a_model_that_carries_data_from_client_to_client_is_refused_before_anything_is_learned():
    one = client(0, make=leaking)
    before = one.vectors.read()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"1\.mean follows the data"):
            one.train(before, 1)
        assert same(before, one.vectors.read())
        one = one.with_data(load_data(1), 2, 1)
    assert client(0, make=leaking, audit=False).train(before, 1).values


def test_psi_that_reaches_nothing_or_the_loss_alone_is_named():
    def unused():
        model, psi = make_model()
        model[0].forward = lambda x: x
        return model, psi

    one = client(1, make=unused)
    with pytest.raises(RuntimeError, match=r"gives 0\.gains\.raw no gradient"):
        one.train(one.vectors.read(), 1)
    model, psi = unused()
    one = Client(model, load_data(1), 2, hyper=psi, loss=lambda y, t: F.cross_entropy(y, t) + psi.gains().sum())
    with pytest.raises(ValueError, match=r"0\.gains\.raw reaches the loss, but not"):
        one.train(one.vectors.read(), 1)
    one = client(1, loss=lambda y, t: F.cross_entropy(y, t, reduction="sum"))
    with pytest.raises(ValueError, match="it is a sum"):
        one.train(one.vectors.read(), 1)


def test_threads_take_turns_with_what_they_draw():
    updates = {}
    clients = [client(number, make=make_noisy, epochs=3) for number in range(4)]
    values = clients[0].vectors.read()
    expected = [one.train(values, 1) for one in clients]

    def work(number):
        updates[number] = clients[number].train(values, 1)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, update in updates.items():
        assert same(update.values, expected[number].values)
    assert len(updates) == 4


def test_a_client_that_diverges_says_so():
    one = client(1, optimizer=lambda model: optim.SGD(model, lr=1e30))
    with pytest.raises(
        RuntimeError, match=r"client 1 diverged in round 1: .*that are not finite, or lower the learning rate"
    ):
        one.train(one.vectors.read(), 1)


def test_evaluation_is_of_the_whole_network():
    one = client(1)
    values = one.vectors.read()
    found = one.evaluate(values)
    assert found["loss"] == pytest.approx(partnets.mean_loss(make_model()[0], load_data(1)), rel=1e-6)
    assert found["accuracy"] == partnets.accuracy(make_model()[0], load_data(1))


def test_a_long_reason_keeps_its_end():
    reason = "first " + 5000 * "between " + "ValueError: the cause"
    assert shown(reason).startswith("first between") and shown(reason).endswith("... " + shown(reason)[-150:])
    assert shown(reason).endswith("ValueError: the cause") and len(shown(reason)) < 310
