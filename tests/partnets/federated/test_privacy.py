"""Privacy: norm bounds and noise of each vector, on clients and on the server, and the resulting epsilon."""

import math

import pytest
import torch
from clients import client, make_model, run, same, server, state

from partnets import federated, optim
from partnets.federated import Privacy


def changes(update, values):
    return {name: vector.double() - values[name].double() for name, vector in update.values.items()}


def test_each_vector_of_a_client_has_a_bound_of_its_own():
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
def test_noise_is_drawn_anew_whatever_the_seeds():
    one = client(2, privacy=Privacy(1.0, 1.0))
    values = one.vectors.read()
    torch.manual_seed(3)
    first = one.train(values, 1)
    torch.manual_seed(3)
    assert not same(first.values, one.train(values, 1).values)


@pytest.mark.full
def test_private_clients_are_taken_by_the_server():
    own = server()
    found = run(own, [client(number, privacy=Privacy(1.0, 0.1)) for number in range(4)], 2)
    assert found.contributors == {1: 2, 2: 3, 3: 4} and not found.refused
    assert found.lml is None and found.examples == 0 and not found.losses


def private_server(z):
    model, psi = make_model()
    return federated.Server(
        model, hyper=psi, weighting="uniform", privacy=Privacy(0.02, z, hyper_max_norm=0.01),
        optimizer=optim.SGD(model, lr=1.0), hyper_optimizer=torch.optim.SGD(psi.parameters(), lr=1.0),
    )  # fmt: skip


@pytest.mark.full
def test_a_server_bounds_each_update_and_adds_the_noise_of_one_to_the_mean():
    exact = private_server(0.0)
    values = exact.values()
    updates = [client(number).train(values, 1) for number in range(4)]
    exact.step(updates)
    for k, givers in ((1, (0, 3)), (2, (0, 1, 3)), (3, (0, 1, 2, 3))):
        name = f"w{k}.float32"
        given = [changes(updates[i], values)[name] for i in givers]
        shortened = [change * min(1, 0.02 / change.norm()) for change in given]
        torch.testing.assert_close(exact.values()[name].double() - values[name].double(), sum(shortened) / len(givers),
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


def test_without_noise_there_is_no_privacy():
    assert Privacy(1.0, 0.0).epsilon(client(0).vectors, 1, 1e-5) == math.inf


def test_wrong_use_is_an_error_that_names_the_cure():
    for wrong in ({"max_norm": 0.0}, {"max_norm": math.nan}, {"hyper_max_norm": -1.0}, {"noise_multiplier": math.inf}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Privacy(**{"max_norm": 1.0, "noise_multiplier": 1.0, **wrong})
    with pytest.raises(ValueError, match="pass weighting='uniform'"):
        server(privacy=Privacy(1.0, 1.0))
    with pytest.raises(ValueError, match="delta=1"):
        Privacy(1.0, 1.0).epsilon(client(0).vectors, 1, 1)


@pytest.mark.full
def test_a_server_with_privacy_is_saved_and_goes_on(tmp_path):
    own = private_server(1.0)
    run(own, [client(number) for number in range(4)], 1)
    own.save(tmp_path / "server.pt")
    again = private_server(1.0)
    again.load(tmp_path / "server.pt")
    assert same(own.values(), again.values()) and again.rounds == 1
    assert same(state(own), state(again))


def test_noise_follows_from_no_seed_that_could_be_searched_for(monkeypatch):
    """Check that torch's CPU generator is not used: a search of its 2**32 seeds takes an hour."""
    monkeypatch.setattr(torch, "randn", None)
    torch.manual_seed(0)
    first, second = (Privacy(1.0, 2.0).noisy({"w1.float32": torch.zeros(100_001)})["w1.float32"] for _ in range(2))
    assert not torch.equal(first, second) and first.unique().numel() == 100_001
    for found in (first, second):
        assert found.mean().abs() < 0.05 and found.std() == pytest.approx(2, rel=0.02)
        inside = [(found.abs() < 2 * bound).double().mean().item() for bound in (1, 2, 3)]
        assert inside == pytest.approx([0.6827, 0.9545, 0.9973], abs=0.006)
    assert torch.corrcoef(torch.stack([first[:50_000], first[50_000:100_000]]))[0, 1].abs() < 0.02


def test_a_client_that_diverged_sends_noise_alone():
    private = Privacy(1.0, 0.0)
    found = private.shortened({"w1.float32": torch.tensor([1.0, math.inf]), "w2.float32": torch.tensor([0.5])})
    assert found["w1.float32"].tolist() == [0.0, 0.0] and found["w2.float32"].tolist() == [0.5]


@pytest.mark.full
def test_little_noise_has_a_large_epsilon():
    pytest.importorskip("dp_accounting")
    vectors = server().vectors
    found = [Privacy(1.0, z).epsilon(vectors, rounds=100, delta=1e-5) for z in (1e-3, 0.5, 2.2, 3.0)]
    assert found == sorted(found, reverse=True) and found[0] > 1e6 and all(map(math.isfinite, found))
