"""Privacy: norm bounds and noise of each vector, on clients and on the server, and the resulting epsilon."""

import math

import pytest
import torch
from clients import PLAIN, client, load_data, run, server

from partnets import optim
from partnets.federated import Privacy


def changes(update, values):
    return {name: vector.double() - values[name].double() for name, vector in update.values.items()}


def private_server(z):
    return server(weighting="uniform", privacy=Privacy(0.02, z, hyper_max_norm=0.01), **PLAIN)


def test_each_vector_of_a_client_is_clipped_to_its_own_bound():
    one, private = client(1), client(1, privacy=Privacy(0.01, 0.0, hyper_max_norm=0.002))
    values = one.vectors.read()
    update, hidden = one.train(values, 1), private.train(values, 1)
    for name, change in changes(update, values).items():
        expected = change * min(1, 0.01 / change.norm())
        torch.testing.assert_close(changes(hidden, values)[name], expected, rtol=1e-3, atol=1e-7)
    assert hidden.gradients["hyper.float32"].norm() == pytest.approx(0.002, rel=1e-5)
    assert hidden.hyper_loss is None and not hidden.losses and hidden.examples == 1
    wide = client(1, privacy=Privacy(1e6, 0.0)).train(values, 1)  # the bound is too large to clip
    torch.testing.assert_close(wide.values, update.values, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(wide.gradients, update.gradients)


@pytest.mark.full
def test_a_clients_noise_is_a_multiple_of_its_bound():
    exact, private = (client(1, privacy=Privacy(0.5, z, hyper_max_norm=0.25)) for z in (0.0, 2.0))
    values = exact.vectors.read()
    center = exact.train(values, 1)
    draws = [private.train(values, 1) for _ in range(60)]
    for name in center.values:
        noise = torch.stack([draw.values[name] - center.values[name] for draw in draws])
        assert float(noise.std()) == pytest.approx(1.0, rel=0.15) and abs(float(noise.mean())) < 0.15
    noise = torch.stack([draw.gradients["hyper.float32"] - center.gradients["hyper.float32"] for draw in draws])
    assert float(noise.std()) == pytest.approx(0.5, rel=0.2)


@pytest.mark.full
def test_a_server_bounds_each_update_and_adds_the_noise_of_one_to_the_mean():
    exact = private_server(0.0)
    values = exact.values()
    updates = [client(number).train(values, 1) for number in range(4)]
    exact.step(updates)
    for k, givers in ((1, (0, 3)), (2, (0, 1, 3)), (3, (0, 1, 2, 3))):
        name = f"w{k}.float32"
        given = [changes(updates[i], values)[name] for i in givers]
        clipped = [change * min(1, 0.02 / change.norm()) for change in given]
        torch.testing.assert_close(exact.values()[name].double() - values[name].double(), sum(clipped) / len(givers),
                                   rtol=1e-3, atol=1e-6)  # fmt: skip
    noises = {name: [] for name in values}
    for _ in range(60):
        own = private_server(50.0)
        own.step(updates)
        for name, vector in own.values().items():
            noises[name].append(vector - exact.values()[name])
    for name, std in {"w1.float32": 1 / 2, "w2.float32": 1 / 3, "w3.float32": 1 / 4, "hyper.float32": 0.5 / 2}.items():
        assert float(torch.stack(noises[name]).std()) == pytest.approx(std, rel=0.2), name


def test_partitions_without_contributors_get_no_noise():
    own = private_server(5.0)
    before = own.values()
    run(own, [client(2)], 1)
    after = own.values()
    assert [torch.equal(before[name], after[name]) for name in before] == [True, True, False, False]


def test_noise_follows_from_no_seed_that_could_be_searched_for(monkeypatch):
    """Check that torch's CPU generator is not used: a search of its 2**32 seeds takes an hour."""
    monkeypatch.setattr(torch, "randn", None)
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        draws.append(Privacy(1.0, 2.0).noisy({"w1.float32": torch.zeros(100_001)})["w1.float32"])
    assert not torch.equal(*draws)
    for found in draws:
        assert found.unique().numel() == 100_001
        assert found.mean().abs() < 0.05 and found.std() == pytest.approx(2, rel=0.02)
        inside = [(found.abs() < 2 * bound).double().mean().item() for bound in (1, 2, 3)]
        assert inside == pytest.approx([0.6827, 0.9545, 0.9973], abs=0.006)
    assert torch.corrcoef(torch.stack([draws[0][:50_000], draws[0][50_000:100_000]]))[0, 1].abs() < 0.02


def test_a_client_that_diverged_sends_only_noise():
    vectors = {"w1.float32": torch.tensor([1.0, math.inf]), "w2.float32": torch.tensor([0.5])}
    found = Privacy(1.0, 0.0).clipped(vectors)
    assert found["w1.float32"].tolist() == [0.0, 0.0] and found["w2.float32"].tolist() == [0.5]
    private = client(1, privacy=Privacy(1.0, 1.0), optimizer=lambda model: optim.SGD(model, lr=1e30))
    update = private.train(private.vectors.read(), 1)
    assert all(vector.isfinite().all() for vector in update.values.values())


def test_private_clients_report_nothing_but_noisy_vectors():
    own = server()
    found = run(own, [client(number, privacy=Privacy(1.0, 0.1)) for number in range(4)], 2)
    assert found.contributors == {1: 2, 2: 3, 3: 4} and not found.refused
    assert found.lml is None and found.examples == 0 and not found.losses


def test_private_clients_of_flower_give_no_reason_and_evaluate_nothing():
    pytest.importorskip("flwr", reason="Flower needs Python 3.11")
    from flwr.app import Message, RecordDict
    from nodes import app, grid, start

    def load(number, clients):
        x, y = load_data(number)
        return x, y + 7  # torch's error would quote these labels

    with pytest.raises(RuntimeError, match="with privacy, the reason is only in its own log") as found:
        start(grid(app(load=load, privacy=Privacy(1.0, 1.0))), 1)
    assert "Target" not in str(found.value)
    (reply,) = grid(app(privacy=Privacy(1.0, 1.0))).send_and_receive([Message(RecordDict(), 1, "evaluate")])
    assert reply.has_error()


def delta_of(epsilon, z):
    """Return the exact delta of the Gaussian mechanism (Balle and Wang 2018)."""

    def phi(t):
        return 0.5 * math.erfc(-t / math.sqrt(2))

    return phi(1 / (2 * z) - epsilon * z) - math.exp(epsilon) * phi(-1 / (2 * z) - epsilon * z)


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("rounds, z", [(1, 2.0), (30, 12.0)])
def test_epsilon_is_of_all_vectors_of_all_rounds(rounds, z):
    """Count three vectors per round: w_1..w_3 for chunk 1, or w_2, w_3 and ψ for chunk 2."""
    pytest.importorskip("dp_accounting", reason="dp_accounting computes epsilon")
    found = Privacy(1.0, z).epsilon(client(0).vectors, rounds, 1e-5)
    assert delta_of(found, z / math.sqrt(3 * rounds)) == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.full
def test_little_noise_has_a_large_epsilon():
    pytest.importorskip("dp_accounting")
    vectors = server().vectors
    found = [Privacy(1.0, z).epsilon(vectors, rounds=100, delta=1e-5) for z in (0.0, 1e-3, 0.5, 2.2, 3.0)]
    assert found == sorted(found, reverse=True) and found[0] == math.inf
    assert found[1] > 1e6 and all(map(math.isfinite, found[1:]))


def test_without_noise_there_is_no_privacy():
    assert Privacy(1.0, 0.0).epsilon(client(0).vectors, 1, 1e-5) == math.inf
